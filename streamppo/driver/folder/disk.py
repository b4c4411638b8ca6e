"""The disk under a run's folder: the journal's SQLite, in WAL mode, shares memory between processes by a file.

A network file system gives processes of several machines different memory, and its locks come and go with its server:
the journal would be damaged without an error.
"""

from pathlib import Path

from streamppo.errors import RunError

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p"}) | frozenset(
    {"lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "pvfs2", "orangefs", "ocfs2", "gfs2"}
)
FUSE = "fuse."
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.bindfs", "fuse.lxcfs"})
"""File systems in user space that are known to be of this machine."""


def refuse_network(folder: Path) -> None:
    """Raise `RunError`, with the remedy, if `folder` is, or would be, on a network file system."""
    kind = file_system(folder, MOUNTS.read_text()) if MOUNTS.exists() else ""
    if kind in NETWORK or (kind.startswith(FUSE) and kind not in LOCAL_FUSE):
        raise RunError(
            f"{folder}: is on a network file system ({kind}), and a run's journal (SQLite in WAL mode) would be "
            "damaged there: keep runs on a disk of the driver's machine (`--runs FOLDER`); on a cluster export that "
            "disk to the other nodes under the same path"
        )


def file_system(folder: Path, mounts: str) -> str:
    """Return the type of the file system of `folder`, by the lines of mountinfo (proc(5)); "" if no line has it."""
    found, longest = "", -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        # A later mount at the same place hides the one before.
        if folder.resolve().is_relative_to(point) and len(point) >= longest:
            found, longest = after.split()[0], len(point)
    return found
