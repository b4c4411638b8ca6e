"""The transports of new weights from the ranks to the rollout actors."""

from collections.abc import Iterator
from typing import TypeAlias

from streamppo.config.base import Kind


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
