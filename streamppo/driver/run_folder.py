"""Checks a run folder's file system, locks the folder, takes requests, and tells whether the run is complete.

RUN                the driver holds a lock (flock) on the folder while it lives, even if files in it are deleted; the
                   kernel releases the lock when the driver ends in any way
RUN/scale.json     the number of rollout actors that a command requests
RUN/scale.taken    the accepted request; removed when config.toml has the number

A network file system is refused, because on it SQLite in WAL mode damages the journal without an error: processes share
memory through a file. This module imports neither Ray nor torch.
"""

import fcntl
import os
import shlex
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from streamppo import durable
from streamppo.config.base import Positive, Section
from streamppo.config.sections import Config
from streamppo.errors import UNREADABLE, RunError
from streamppo.learner.checkpoint import manifest
from streamppo.telemetry import metrics_file
from streamppo.telemetry.metrics_file import FINISHED

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "9p"}) | frozenset(
    {"lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "pvfs2", "orangefs", "ocfs2", "gfs2"}
)
FUSE = "fuse."
LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.bindfs", "fuse.lxcfs"})
LOCK_S = 1.0
"""Seconds for which a driver tries to get the lock. `is_running` holds a lock for a shorter time."""
SCALE = "scale.json"
ACCEPTED = "scale.taken"
WAIT_S = 60.0
"""Time limit of `scale` for the answer of the driver, which looks for requests twice a second during training."""
POLL_S = 0.1
FINAL_CONFIG = Path("final/config.json")


def refuse_place(folder: Path) -> None:
    """Raise `RunError` if `folder` is on a network file system, or would be there, or has a path that is not UTF-8."""
    kind = file_system(folder, durable.read_kernel(MOUNTS))
    if kind in NETWORK or (kind.startswith(FUSE) and kind not in LOCAL_FUSE):
        raise RunError(
            f"{folder}: is on a network file system ({kind}), and a run's journal (SQLite in WAL mode) would be "
            "damaged there: keep runs on a disk of the driver's machine (`--runs FOLDER`); on a cluster export that "
            "disk to the other nodes under the same path, or set cluster.own_disks = true and checkpoint.remote = "
            "'file://NETWORK_FOLDER'"
        )
    refuse_bytes(folder)


def refuse_bytes(folder: Path) -> None:
    """Raise `RunError` for a path that is not UTF-8, because the journal, JSON and TOML cannot store it."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise RunError(f"{folder}: a run's folder needs a path in UTF-8: rename it") from error


def file_system(folder: Path, mounts: str) -> str:
    """Return the type of `folder`'s file system from `mounts`, the text of mountinfo (proc(5)); "" without a match."""
    kind, longest = "", -1
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = durable.mount_point(before.split()[4])
        # If two mounts have the same mount point, the later one hides the earlier one.
        if folder.resolve().is_relative_to(point) and len(point) >= longest:
            kind, longest = after.split()[0], len(point)
    return kind


@contextmanager
def driver_lock(folder: Path) -> Generator[None]:
    """Lock the run in `folder` for its driver, and delete earlier requests. Raises `RunError` if it has a driver."""
    with _open_folder(folder) as opened:
        deadline = time.monotonic() + LOCK_S
        while not _try_lock(folder, opened, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise RunError(f"{folder}: this run is already running, in another process")
            time.sleep(POLL_S)
        # On a read-only disk, even the deletion of a missing file raises an error.
        for request in filter(Path.exists, (folder / SCALE, folder / ACCEPTED)):
            with durable.naming(request, RunError):
                request.unlink(missing_ok=True)
        yield


def is_running(folder: Path) -> bool:
    """Return whether the run has a live driver. Raises `RunError` if the file system has no locks."""
    with _open_folder(folder) as opened:
        return not _try_lock(folder, opened, fcntl.LOCK_SH)


@contextmanager
def _open_folder(folder: Path) -> Generator[int]:
    """Open the folder for flock. Closing the descriptor releases the lock."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RunError(f"{folder}: {error.strerror}") from error
    try:
        yield opened
    finally:
        os.close(opened)


def _try_lock(folder: Path, opened: int, kind: int) -> bool:
    try:
        fcntl.flock(opened, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunError(
            f"{folder}: {error.strerror}: a run's folder must be on a file system with locks (flock)"
        ) from error
    return True


class Scale(Section, frozen=True):
    """A request to a run's driver: the number of rollout actors."""

    rollouts: Positive


def scale(folder: Path, rollouts: int) -> None:
    """Request `rollouts` rollout actors from the run's driver, and wait for its answer. Raises `RunError`."""
    if not is_running(folder):
        resume = f"streamppo resume {shlex.quote(str(folder))} rollout.actors={rollouts}"
        raise RunError(f"{folder}: this run is not running; use `{resume}`")
    with durable.naming(folder / SCALE, RunError):
        durable.write(folder / SCALE, msgspec.json.encode(Scale(rollouts=rollouts)))
    deadline = time.monotonic() + WAIT_S
    while (folder / SCALE).exists() or (folder / ACCEPTED).exists():
        if not is_running(folder):
            (folder / SCALE).unlink(missing_ok=True)
            raise RunError(f"{folder}: the run ended before it applied the number")
        if time.monotonic() > deadline:
            raise RunError(f"{folder}: no answer within {WAIT_S:g} s; the run applies the number later")
        time.sleep(POLL_S)


def accept(folder: Path) -> int | None:
    """Return the requested number of rollout actors; None without a request. Raises `RunError` for an invalid file."""
    try:
        os.replace(folder / SCALE, folder / ACCEPTED)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(durable.read(folder / ACCEPTED), type=Scale).rollouts
    except (OSError, *UNREADABLE) as error:
        raise RunError(f"{folder / SCALE}: {error}") from error


def answer(folder: Path) -> None:
    """Tell the waiting command that the driver has applied or refused its request."""
    (folder / ACCEPTED).unlink(missing_ok=True)


def nothing_to_do(config: Config, run: Path) -> str:
    """Return the message for a run in the folder `run` that is complete under `config`; "" if there is work left."""
    lines = metrics_file.read(run)
    recorded = metrics_file.recorded_versions(lines)
    newest = max(recorded, default=0)
    last = lines[-1] if lines else None
    if last is None or "end" not in last or last["end"] != FINISHED:
        return ""
    if newest < config.updates or len(recorded) < newest:
        return ""
    checkpoints = [int(path.name) for path in manifest.complete(run / "checkpoints")]
    if not (run / FINAL_CONFIG).is_file() or newest not in checkpoints:
        return ""
    quoted = shlex.quote(str(run))
    return (
        f"{run}: nothing to do, and nothing is changed: all {newest} updates are made, and updates = {config.updates}; "
        f"more of them: streamppo resume {quoted} updates={max(newest, config.updates) + 50}; "
        f"another evaluation: streamppo eval {quoted}"
    )
