"""The `learner.mesh` part of the configuration: how the state of a model is divided between ranks."""

from collections.abc import Iterator

from streamppo.config.base import Positive, Section


class Mesh(Section, frozen=True):
    """Ranks in copies of the model: within a copy they have a shard each, and gradients are summed over copies.

    FSDP2's hybrid sharding, as torchtitan has it. A copy's ranks follow one another, which puts them on one node where
    there is room: weights are then gathered within nodes, and gradients of a shard alone travel between them.
    """

    replicate: Positive = 1
    """Copies of the sharded weights and moments; it divides `ranks`."""

    def refuses(self, ranks: int) -> Iterator[str]:
        """Say why `ranks` cannot be divided so."""
        if ranks % self.replicate:
            yield f"learner.mesh.replicate ({self.replicate}) must divide learner.ranks ({ranks})"

    def shards(self, ranks: int) -> int:
        """Return the number of ranks that have one copy between them."""
        return ranks // self.replicate
