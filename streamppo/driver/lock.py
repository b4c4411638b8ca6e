"""A run that goes on, as other commands see it.

RUN/driver.lock    locked by the driver as long as it lives; the kernel gives it up however the driver ends
RUN/scale.json     how many rollout actors somebody wants
RUN/scale.taken    the same, while the driver sees to it; gone when it has, and config.toml has the number
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from streamppo import durable
from streamppo.config.base import Positive, Section
from streamppo.errors import RunError

LOCK = "driver.lock"
SCALE = "scale.json"
TAKEN = "scale.taken"
WAIT_S = 60.0
"""How long `scale` waits for the driver, which looks every half second once its learner has been loaded."""
POLL_S = 0.1


class Scale(Section, frozen=True):
    """What somebody wants of the run."""

    rollouts: Positive


@contextmanager
def held(folder: Path) -> Generator[None]:
    """The lock of a run's only driver. Raises `RunError` if there is another one, or the folder takes no lock.

    What the driver before was asked for is forgotten: a run begins with the configuration that it is told.
    """
    try:
        file = (folder / LOCK).open("ab")
    except OSError as error:
        raise RunError(f"{folder / LOCK}: {error.strerror}") from error
    with file:
        if not _locked(file, fcntl.LOCK_EX):
            raise RunError(f"{folder}: this run is already running, in another process")
        for name in (SCALE, TAKEN):
            with durable.naming(folder / name, RunError):
                (folder / name).unlink(missing_ok=True)
        yield


def goes_on(folder: Path) -> bool:
    """Whether the run has a driver that lives."""
    try:
        with (folder / LOCK).open("rb") as file:
            return not _locked(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _locked(file: BinaryIO, kind: int) -> bool:
    """Lock an open file, unless somebody else has. Raises `RunError` where the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise RunError(
            f"{file.name}: {error.strerror}: a run's folder must be on a file system with locks (flock)"
        ) from error
    return True


def scale(folder: Path, rollouts: int, within_s: float = WAIT_S) -> None:
    """Ask the run in `folder` for so many rollout actors, and wait until it has taken the number over.

    Raises `RunError` if it does not go on, or has not answered `within_s`.
    """
    if not goes_on(folder):
        raise RunError(f"{folder}: this run is not running: `streamppo resume {folder} rollout.actors={rollouts}`")
    with durable.naming(folder / SCALE, RunError):
        durable.write(folder / SCALE, msgspec.json.encode(Scale(rollouts=rollouts)))
    deadline = time.monotonic() + within_s
    while (folder / SCALE).exists() or (folder / TAKEN).exists():
        if not goes_on(folder):
            (folder / SCALE).unlink(missing_ok=True)
            raise RunError(f"{folder}: the run has ended before it took the number over")
        if time.monotonic() > deadline:
            raise RunError(f"{folder}: no answer within {within_s:g} s; the run takes the number over when it can")
        time.sleep(POLL_S)


def take(folder: Path) -> int | None:
    """How many rollout actors the driver is asked for, if it is; then `done` is the answer.

    Raises `RunError` for a file that `scale` has not written.
    """
    try:
        os.replace(folder / SCALE, folder / TAKEN)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode((folder / TAKEN).read_bytes(), type=Scale).rollouts
    except msgspec.MsgspecError as error:
        raise RunError(f"{folder / SCALE}: {error}") from error


def done(folder: Path) -> None:
    """The driver has seen to what it took."""
    (folder / TAKEN).unlink(missing_ok=True)
