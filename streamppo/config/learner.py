"""The `[learner]` section of the configuration."""

from collections.abc import Iterator
from typing import Literal

from streamppo.config.base import Count, Fraction, Machine, NonNegative, Positive, PositiveFloat, Processes
from streamppo.config.mesh import Mesh
from streamppo.config.transport import ObjectStore, Transport


class Learner(Machine, frozen=True, kw_only=True):
    """The ranks that train."""

    lr: PositiveFloat = 1e-6
    """AdamW's learning rate: 1e-6 for a billion weights, 1e-3 for 0.1 million."""
    threads: Positive | Literal["auto"] = "auto"
    """CPU threads of a rank; auto: 1, or more for a large model."""
    ranks: Processes = 1
    """Learner ranks, one Ray actor each."""
    mesh: Mesh = Mesh()
    """Parallelism of the model over the ranks."""
    warmup_updates: Count = 0
    """Updates over which the learning rate rises from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate until the last update."""
    final_lr_share: Fraction = 0.0
    """Learning rate at the end, as a share of lr."""
    lr_by_ess: Literal["auto", "on", "off"] = "auto"
    """Scale lr by the root of the effective sample size; auto: on with an adaptive lag."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moments."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient's global norm is clipped to this."""
    norm: Literal["2-norm", "max-norm"] = "2-norm"
    """The norm for max_grad_norm: Euclidean, or the largest entry."""
    max_bad_steps: Positive = 3
    """Skipped steps with a non-finite gradient in a row after which the run stops."""
    epochs: Positive = 1
    """Passes over one batch."""
    minibatches: Positive = 1
    """Optimizer steps in one epoch."""
    micro_batch_tokens: Positive = 16384
    """Tokens of one pass on a rank (or on the ranks of a row), padding included."""
    offload: bool = False
    """Keep weights, gradients and moments in CPU memory, and step there."""
    exact: bool = True
    """Bit-identical recovery and replay; false is faster on a GPU."""
    bucket_bytes: Positive = 256 * 1024 * 1024
    """Size of the buckets in which weights are sent."""
    deltas: Literal["auto", "on", "off"] = "auto"
    """Push only changed elements if that is less; auto: on a cluster."""
    transport: Transport = ObjectStore()
    """Transport of new weights to the rollout actors."""

    @property
    def thread_count(self) -> int:
        """Threads of a rank; 1 where no run has chosen a number."""
        return 1 if self.threads == "auto" else self.threads

    def contradictions(self) -> Iterator[str]:
        """With a beta of 1 a moment would stay 0."""
        if max(self.betas) == 1:
            yield f"betas ({list(self.betas)}) must be below 1: with 1 a moment ignores every gradient"
