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
    """Replicas of the model: each rank of a replica has a shard, and gradients are summed over replicas.

    FSDP2's hybrid sharding, as in torchtitan. A replica's ranks are consecutive, so they share a node if it has room:
    weights are then gathered within nodes, and only gradients of a shard go between them. The ranks of a `tensor`,
    `expert` or `context` group are consecutive too; `context` is Ulysses context parallelism
    (https://arxiv.org/abs/2309.14509).
    """

    replicate: Positive = 1
    """Replicas of the sharded weights and moments; a divisor of `ranks`."""
    context: Positive = 1
    """Ranks that share a row's tokens; a divisor of a replica's ranks."""
    tensor: Positive = 1
    """Ranks that share layers' heads and units; a divisor of a replica's ranks."""
    expert: Positive = 1
    """Ranks that share layers' experts; a divisor of a replica's ranks and of the experts."""

    def refuses(self, ranks: int, prefix: str, *, adapted: bool, compiled: bool) -> Iterator[str]:
        """Yield reasons against this mesh of `ranks`; `prefix` is queue.segments.prefix, the flags the model's."""
        if ranks % self.replicate:
            yield f"learner.mesh.replicate ({self.replicate}) must divide learner.ranks ({ranks})"
        else:
            of = f"learner.ranks ({ranks})" if self.replicate == 1 else f"the {self.shards(ranks)} ranks of a copy"
            for name, parts in (("context", self.context), ("tensor", self.tensor), ("expert", self.expert)):
                if self.shards(ranks) % parts:
                    yield f"learner.mesh.{name} ({parts}) must divide {of}"
            if self.context > 1 and self.tensor > 1 and self.shards(ranks) % self.slices:
                yield f"learner.mesh.context * tensor ({self.slices}) must divide {of}"
        cut = [f"learner.mesh.{name} = {n}" for name, n in (("tensor", self.tensor), ("expert", self.expert)) if n > 1]
        if self.slices > 1 and prefix == "detached":
            (choice, *_) = self.own_attention
            yield (
                f"{choice} computes all tokens of a row together: it is not possible with queue.segments.prefix = "
                + ("'detached'")
            )
        if cut and adapted:
            yield f"{cut[0]} splits weights, which model.lora does not support: choose one"
        if cut and compiled:
            yield f"{cut[0]} is not possible with model.compile = True"

    @property
    def slices(self) -> int:
        """Ranks that share a row."""
        return self.context * self.tensor

    @property
    def own_attention(self) -> tuple[str, ...]:
        """The choices here that need the learner's own attention."""
        named = (("context", self.context), ("tensor", self.tensor))
        return tuple(f"learner.mesh.{name} = {ranks}" for name, ranks in named if ranks > 1)

    def shards(self, ranks: int) -> int:
        """Return the number of ranks of a replica."""
        return ranks // self.replicate


class ObjectStore(Kind, frozen=True, tag="object_store"):
    """Ray's object store."""

    def refuses_disks(self, *, own: bool) -> Iterator[str]:
        """Reasons against nodes with disks of their `own`: none."""
        return iter(())


class Folder(Kind, frozen=True, tag="folder"):
    """Files in a folder that all nodes see."""

    path: str = ""
    """A folder that every node sees, with room for three versions; empty is in the run's folder."""

    def refuses_disks(self, *, own: bool) -> Iterator[str]:
        """Reason against nodes with disks of their `own`, if there is one."""
        if own and not self.path:
            yield (
                "learner.transport = { kind = 'folder' } needs a path with cluster.own_disks: nodes do not see the "
                "run's folder"
            )


class Nixl(Kind, frozen=True, tag="nixl"):
    """NIXL (extra `nixl`): actors read the ranks' memory."""

    def refuses_disks(self, *, own: bool) -> Iterator[str]:
        """Reasons against nodes with disks of their `own`: none."""
        return iter(())


Transport: TypeAlias = ObjectStore | Folder | Nixl


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
