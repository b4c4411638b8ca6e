"""The `[learner]` section of the configuration."""

from collections.abc import Iterator
from typing import Literal

from streamppo.config.base import Count, Fraction, Machine, NonNegative, Positive, PositiveFloat
from streamppo.config.mesh import Mesh
from streamppo.config.transport import ObjectStore, Transport


class Learner(Machine, frozen=True, kw_only=True):
    """The ranks that train."""

    lr: PositiveFloat = 1e-6
    """AdamW's learning rate: as a rule 1e-6 for weights of a billion, and 1e-3 for those of 0.1 million."""
    threads: Positive | Literal["auto"] = "auto"
    """CPU threads of a rank; auto: 1, for a large model on this machine more; a run keeps the number of its start."""
    ranks: Positive = 1
    """Learner ranks, one Ray actor each."""
    mesh: Mesh = Mesh()
    """Division of the model between ranks."""
    warmup_updates: Count = 0
    """Updates over which the learning rate rises from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Fall of the learning rate until the last update."""
    final_lr_share: Fraction = 0.0
    """The learning rate at the end of the decay, as a share of lr."""
    lr_by_ess: Literal["auto", "on", "off"] = "auto"
    """The rate times the root of a batch's effective sample size (VCPO); `auto` does so with an adaptive lag."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moments."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient's global norm is clipped to this."""
    norm: Literal["2-norm", "max-norm"] = "2-norm"
    """The norm that is meant: the length of the gradient, or its largest entry."""
    max_bad_steps: Positive = 3
    """Optimizer steps in a row whose gradient is not finite are skipped; after so many the run stops."""
    epochs: Positive = 1
    """Passes over one batch."""
    minibatches: Positive = 1
    """Optimizer steps in one epoch."""
    micro_batch_tokens: Positive = 16384
    """Tokens of a forward and backward on one rank (or `mesh`'s for a row), padding included; flash-attn has none."""
    offload: bool = False
    """Weights, gradients and moments stay in CPU memory, and AdamW steps there; a layer visits the GPU for its pass."""
    exact: bool = True
    """The same bits every time, so that recovery and replay make the recorded weights; false is faster on a GPU."""
    bucket_bytes: Positive = 256 * 1024 * 1024
    """New weights travel to the engines in flat buckets of about this size."""
    deltas: Literal["auto", "on", "off"] = "auto"
    """Push what has changed alone, where that is less; `auto` does so on a cluster, where bytes cost more than time."""
    transport: Transport = ObjectStore()
    """Way of new weights to the rollout actors."""

    @property
    def thread_count(self) -> int:
        """Threads of a rank; 1 where no run has chosen a number."""
        return 1 if self.threads == "auto" else self.threads

    def contradictions(self) -> Iterator[str]:
        """A moment that never takes in a gradient stays 0."""
        if max(self.betas) == 1:
            yield f"betas ({list(self.betas)}) must be below 1: a moment of 1 never takes in a gradient"
