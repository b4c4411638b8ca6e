"""The `learner.mesh` part of the configuration: how a model's state, and its rows, are divided between ranks."""

from collections.abc import Iterator

from streamppo.config.base import Positive, Section


class Mesh(Section, frozen=True):
    """Ranks in copies of the model: within a copy they have a shard each, and gradients are summed over copies.

    FSDP2's hybrid sharding, as torchtitan has it. A copy's ranks follow one another, which puts them on one node where
    there is room: weights are then gathered within nodes, and gradients of a shard alone travel between them. So do
    those of `tensor`, of `expert` and of `context`, which is Ulysses context parallelism
    (https://arxiv.org/abs/2309.14509).
    """

    replicate: Positive = 1
    """Copies of the sharded weights and moments; it divides `ranks`."""
    context: Positive = 1
    """Ranks that compute a row between them, each a slice of its tokens; it divides the ranks of a copy."""
    tensor: Positive = 1
    """Ranks with a share of every layer's heads and units each, and a slice of a row; it divides those of a copy."""
    expert: Positive = 1
    """Ranks with a share of every layer's experts each; it divides the ranks of a copy, and the experts."""

    def refuses(self, ranks: int, prefix: str, *, adapted: bool, compiled: bool) -> Iterator[str]:
        """Say why `ranks` cannot be divided so, for a run that has this `queue.segments.prefix` and such a model."""
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
            yield f"{cut[0]} cuts weights that model.lora leaves whole: choose one"
        if cut and compiled:
            yield f"{cut[0]} is not possible with model.compile = True"

    @property
    def slices(self) -> int:
        """Ranks that compute a row between them."""
        return self.context * self.tensor

    @property
    def own_attention(self) -> tuple[str, ...]:
        """The choices here for which the learner changes what attention looks at."""
        named = (("context", self.context), ("tensor", self.tensor))
        return tuple(f"learner.mesh.{name} = {ranks}" for name, ranks in named if ranks > 1)

    def shards(self, ranks: int) -> int:
        """Return the number of ranks that have one copy between them."""
        return ranks // self.replicate
