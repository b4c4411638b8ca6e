"""The `learner.mesh` part of the configuration: how a model's state, and its rows, are divided between ranks."""

from collections.abc import Iterator

from streamppo.config.base import Positive, Section


class Mesh(Section, frozen=True):
    """Ranks in copies of the model: within a copy they have a shard each, and gradients are summed over copies.

    FSDP2's hybrid sharding, as torchtitan has it. A copy's ranks follow one another, which puts them on one node where
    there is room: weights are then gathered within nodes, and gradients of a shard alone travel between them. So do
    those of `context`, which is Ulysses context parallelism (https://arxiv.org/abs/2309.14509).
    """

    replicate: Positive = 1
    """Copies of the sharded weights and moments; it divides `ranks`."""
    context: Positive = 1
    """Ranks that compute a row between them, each a slice of its tokens; it divides the ranks of a copy."""

    def refuses(self, ranks: int, prefix: str) -> Iterator[str]:
        """Say why `ranks` cannot be divided so, for a run that has this `queue.segments.prefix`."""
        if ranks % self.replicate:
            yield f"learner.mesh.replicate ({self.replicate}) must divide learner.ranks ({ranks})"
        elif self.shards(ranks) % self.context:
            of = f"learner.ranks ({ranks})" if self.replicate == 1 else f"the {self.shards(ranks)} ranks of a copy"
            yield f"learner.mesh.context ({self.context}) must divide {of}"
        if self.context > 1 and prefix == "detached":
            yield (
                f"learner.mesh.context = {self.context} computes all tokens of a row together: it is not possible with "
                "queue.segments.prefix = 'detached'"
            )

    @property
    def own_attention(self) -> tuple[str, ...]:
        """The choices here for which the learner changes what attention looks at."""
        return (f"learner.mesh.context = {self.context}",) if self.context > 1 else ()

    def shards(self, ranks: int) -> int:
        """Return the number of ranks that have one copy between them."""
        return ranks // self.replicate
