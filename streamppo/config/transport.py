"""Ways of new weights from the ranks to the rollout actors, as a configuration may choose them."""

from collections.abc import Iterator
from typing import TypeAlias

from streamppo.config.base import Kind


class ObjectStore(Kind, frozen=True, tag="object_store"):
    """Ray's object store: everywhere, without a setting."""

    def refuses_disks(self, *, own: bool) -> Iterator[str]:
        """Reasons that it cannot be where nodes have disks of their `own`: none."""
        return iter(())


class Folder(Kind, frozen=True, tag="folder"):
    """Files in a folder that all nodes see."""

    path: str = ""
    """A folder that every node of ranks and actors sees, with room for three versions; empty is in the run's own."""

    def refuses_disks(self, *, own: bool) -> Iterator[str]:
        """Reason that it cannot be where nodes have disks of their `own`."""
        if own and not self.path:
            yield (
                "learner.transport = { kind = 'folder' } needs a path with cluster.own_disks: nodes do not see the "
                "run's folder"
            )


class Nixl(Kind, frozen=True, tag="nixl"):
    """NIXL (extra `nixl`): actors read the memory of ranks, through the fastest device of both nodes that it finds."""

    def refuses_disks(self, *, own: bool) -> Iterator[str]:
        """Reasons that it cannot be where nodes have disks of their `own`: none."""
        return iter(())


Transport: TypeAlias = ObjectStore | Folder | Nixl
