"""The link between a run's driver and other commands: a lock while the driver lives, and requests for rollout actors.

RUN                the driver holds a lock (flock) on the folder while it lives, whatever is deleted in it; the kernel
                   releases the lock however the driver ends
RUN/scale.json     the number of rollout actors that a command requests
RUN/scale.taken    the accepted request; removed once config.toml has the number
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
from streamppo.errors import UNREADABLE, RunError

LOCK_S = 1.0
"""How long a driver tries to lock: longer than `is_running` holds its shared lock."""
SCALE = "scale.json"
ACCEPTED = "scale.taken"
WAIT_S = 60.0
"""How long `scale` waits for the driver, which checks every half second once its learner has loaded."""
POLL_S = 0.1


class Scale(Section, frozen=True):
    """A request to a run's driver."""

    rollouts: Positive


@contextmanager
def driver_lock(folder: Path) -> Generator[None]:
    """Lock the run in `folder` for its driver. Raises `RunError` if it has one, or the file system has no locks.

    Requests to an earlier driver are deleted: a run starts with its given configuration.
    """
    with _open_folder(folder) as opened:
        deadline = time.monotonic() + LOCK_S
        while not _try_lock(folder, opened, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise RunError(f"{folder}: this run is already running, in another process")
            time.sleep(POLL_S)
        for request in (folder / SCALE, folder / ACCEPTED):
            _forget(request)
        yield


def _forget(request: Path) -> None:
    # On a read-only disk even deleting a missing file fails.
    if request.exists():
        with durable.naming(request, RunError):
            request.unlink(missing_ok=True)


def is_running(folder: Path) -> bool:
    """Return True if the run has a live driver; write nothing. Raises `RunError` if the file system has no locks."""
    with _open_folder(folder) as opened:
        return not _try_lock(folder, opened, fcntl.LOCK_SH)


@contextmanager
def _open_folder(folder: Path) -> Generator[int]:
    """A file descriptor of the folder for flock; closing it releases the lock."""
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


def scale(folder: Path, rollouts: int, within_s: float = WAIT_S) -> None:
    """Request `rollouts` rollout actors for the run in `folder`, and wait until its driver has answered.

    Raises `RunError` if the run has no driver, or none that answers `within_s`.
    """
    if not is_running(folder):
        resume = f"streamppo resume {shlex.quote(str(folder))} rollout.actors={rollouts}"
        raise RunError(f"{folder}: this run is not running: `{resume}`")
    with durable.naming(folder / SCALE, RunError):
        durable.write(folder / SCALE, msgspec.json.encode(Scale(rollouts=rollouts)))
    deadline = time.monotonic() + within_s
    while (folder / SCALE).exists() or (folder / ACCEPTED).exists():
        if not is_running(folder):
            (folder / SCALE).unlink(missing_ok=True)
            raise RunError(f"{folder}: the run has ended before it applied the number")
        if time.monotonic() > deadline:
            raise RunError(f"{folder}: no answer within {within_s:g} s; the run applies the number when it can")
        time.sleep(POLL_S)


def accept(folder: Path) -> int | None:
    """Return the requested number of rollout actors, None without a request; call `answer` after it.

    Raises `RunError` for a file that `scale` has not written.
    """
    try:
        os.replace(folder / SCALE, folder / ACCEPTED)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(durable.read(folder / ACCEPTED), type=Scale).rollouts
    except (OSError, *UNREADABLE) as error:
        raise RunError(f"{folder / SCALE}: {error}") from error


def answer(folder: Path) -> None:
    """Let the requesting command return: the driver has applied or refused the request."""
    (folder / ACCEPTED).unlink(missing_ok=True)
