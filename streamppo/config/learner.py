"""The `[learner]` section of the configuration: the ranks that train, their mesh, and the transport of new weights."""

from collections.abc import Iterator
from typing import Literal, TypeAlias

from streamppo.config.base import (
    Count,
    Fraction,
    Kind,
    Machine,
    NonNegative,
    Positive,
    PositiveFloat,
    Processes,
    Section,
)


class Mesh(Section, frozen=True):
    """How ranks share the model: the ranks of a replica hold one shard each, and gradients are summed over replicas.

    The layout is FSDP2's hybrid sharding, as in torchtitan. The ranks of a replica are consecutive, so they share a
    node if it has room. Weights are then gathered within a node, and only gradients cross nodes. The ranks of a
    `tensor`, `expert` or `context` group are consecutive too. `context` is Ulysses context parallelism
    (https://arxiv.org/abs/2309.14509).
    """

    replicate: Positive = 1
    """Replicas of the sharded weights and moments; a divisor of `ranks`."""
    context: Positive = 1
    """Ranks that share a row's tokens; a divisor of a replica's ranks."""
    tensor: Positive = 1
    """Ranks that share each layer's heads and units; a divisor of a replica's ranks."""
    expert: Positive = 1
    """Ranks that share each layer's experts; a divisor of the experts and of a replica's ranks."""

    def refuses(self, ranks: int, prefix: str, *, adapted: bool, compiled: bool) -> Iterator[str]:
        """Yield a sentence for every reason against this mesh. `prefix` is queue.segments.prefix.

        `adapted` is true with model.lora, `compiled` with model.compile.
        """
        if ranks % self.replicate:
            yield f"learner.mesh.replicate ({self.replicate}) must divide learner.ranks ({ranks})"
        else:
            divided = (
                f"learner.ranks ({ranks})" if self.replicate == 1 else f"the {self.shards(ranks)} ranks of a replica"
            )
            for name, parts in (("context", self.context), ("tensor", self.tensor), ("expert", self.expert)):
                if self.shards(ranks) % parts:
                    yield f"learner.mesh.{name} ({parts}) must divide {divided}"
            if self.context > 1 and self.tensor > 1 and self.shards(ranks) % self.slices:
                yield f"learner.mesh.context * tensor ({self.slices}) must divide {divided}"
        splits = [
            f"learner.mesh.{name} = {n}" for name, n in (("tensor", self.tensor), ("expert", self.expert)) if n > 1
        ]
        if self.slices > 1 and prefix == "detached":
            (choice, *_) = self.attention_settings
            yield (
                f"{choice} computes all tokens of a row together: it is not possible with "
                "queue.segments.prefix = 'detached'"
            )
        if splits and adapted:
            yield f"{splits[0]} splits weights, which model.lora does not support: choose one"
        if splits and compiled:
            yield f"{splits[0]} is not possible with model.compile = True"

    @property
    def slices(self) -> int:
        """Number of ranks that share a row."""
        return self.context * self.tensor

    @property
    def attention_settings(self) -> tuple[str, ...]:
        """The settings of this table that need streamppo's attention."""
        named = (("context", self.context), ("tensor", self.tensor))
        return tuple(f"learner.mesh.{name} = {ranks}" for name, ranks in named if ranks > 1)

    def shards(self, ranks: int) -> int:
        """Return the number of ranks of a replica."""
        return ranks // self.replicate


class ObjectStore(Kind, frozen=True, tag="object_store"):
    """Ray's object store."""


class Folder(Kind, frozen=True, tag="folder"):
    """Files in a folder that all nodes share."""

    path: str = ""
    """A folder that all nodes share, with room for three versions; empty: in the run's folder."""


class Nixl(Kind, frozen=True, tag="nixl"):
    """NIXL (extra `nixl`)."""


Transport: TypeAlias = ObjectStore | Folder | Nixl


class Learner(Machine, frozen=True, kw_only=True):
    """The ranks that train."""

    lr: PositiveFloat = 1e-6
    """AdamW's learning rate: 1e-6 for a billion weights, 1e-3 for 0.1 million."""
    threads: Positive | Literal["auto"] = "auto"
    """CPU threads of a rank; "auto": 1, or more for a large model on a CPU."""
    ranks: Processes = 1
    """Learner ranks, one Ray actor each."""
    mesh: Mesh = Mesh()
    """Parallelism of the model over the ranks."""
    warmup_updates: Count = 0
    """Number of first updates in which the learning rate rises from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate from the warm-up to the last update."""
    final_lr_share: Fraction = 0.0
    """The share of lr at which the decay ends, after the last update."""
    lr_by_ess: Literal["auto", "on", "off"] = "auto"
    """Multiply lr by the root of ess_sequence; "auto" is "on" with an adaptive lag."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    norm: Literal["2-norm", "max-norm"] = "2-norm"
    """The norm of max_grad_norm: Euclidean, or the largest absolute entry."""
    max_bad_steps: Positive = 3
    """The run stops after this many consecutive steps without a finite gradient."""
    epochs: Positive = 1
    """Passes over one batch."""
    minibatches: Positive = 1
    """Optimizer steps in one epoch."""
    micro_batch_tokens: Positive = 16384
    """Maximum tokens of a forward pass, with padding, on a rank or the ranks that share a row."""
    offload: bool = False
    """Keep weights, gradients, moments and the optimizer on the CPU."""
    exact: bool = True
    """Recover and replay bit for bit; false is faster on a GPU."""
    bucket_bytes: Positive = 256 * 1024 * 1024
    """Size of the buckets of pushed weights."""
    deltas: Literal["auto", "on", "off"] = "auto"
    """Push only changed weights if these are fewer bytes; "auto" is "on" on a cluster."""
    transport: Transport = ObjectStore()
    """Transport of new weights to the rollout actors."""

    @property
    def steps(self) -> int:
        """Optimizer steps on one batch."""
        return self.epochs * self.minibatches

    @property
    def thread_count(self) -> int:
        """CPU threads of a rank; 1 if "auto" has not been resolved yet."""
        return 1 if self.threads == "auto" else self.threads

    def contradictions(self) -> Iterator[str]:
        if max(self.betas) == 1:
            yield f"betas ({list(self.betas)}) must be below 1: with 1 a moment ignores every gradient"
