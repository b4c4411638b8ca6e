"""The `learner.mesh` part of the configuration: how a model's state and its rows are sharded over ranks."""

from collections.abc import Iterator

from streamppo.config.base import Positive, Section


class Mesh(Section, frozen=True):
    """Replicas of the model: each rank of a replica has a shard, and gradients are summed over replicas.

    FSDP2's hybrid sharding, as in torchtitan. A replica's ranks are consecutive, so they share a node if it has room:
    weights are then gathered within nodes, and only gradients of a shard go between them. The ranks of a `tensor`,
    `expert` or `context` group are consecutive too; `context` is Ulysses context parallelism
    (https://arxiv.org/abs/2309.14509).
    """

    replicate: Positive = 1
    """Replicas of the sharded weights and moments; it divides `ranks`."""
    context: Positive = 1
    """Ranks that share a row's tokens; it divides a replica's ranks."""
    tensor: Positive = 1
    """Ranks that share layers' heads and units; it divides a replica's ranks."""
    expert: Positive = 1
    """Ranks that share layers' experts; it divides a replica's ranks and the experts."""

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
