"""Refuses run folders on network file systems: SQLite in WAL mode shares memory between processes through a file.

On a network file system, processes on several machines would see different memory, and locks are lost when the server
restarts: the journal would be damaged without an error.
"""

from pathlib import Path

from streamppo import durable
from streamppo.errors import RunError

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p"}) | frozenset(
    {"lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "pvfs2", "orangefs", "ocfs2", "gfs2"}
)
FUSE = "fuse."
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.bindfs", "fuse.lxcfs"})
"""FUSE file systems that are known to be local."""


def refuse_network(folder: Path) -> None:
    """Raise `RunError`, with the remedy, if `folder` is, or would be, on a network file system."""
    kind = file_system(folder, durable.read_kernel(MOUNTS))
    if kind in NETWORK or (kind.startswith(FUSE) and kind not in LOCAL_FUSE):
        raise RunError(
            f"{folder}: is on a network file system ({kind}), and a run's journal (SQLite in WAL mode) would be "
            "damaged there: keep runs on a disk of the driver's machine (`--runs FOLDER`); on a cluster export that "
            "disk to the other nodes under the same path"
        )


def file_system(folder: Path, mounts: str) -> str:
    """Return the type of `folder`'s file system by `mounts`, the text of mountinfo (proc(5)); "" if no line matches."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = durable.mount_point(before.split()[4])
        # A later mount at the same point hides the earlier one.
        if folder.resolve().is_relative_to(point) and len(point) >= longest:
            kind, longest = after.split()[0], len(point)
    return kind
