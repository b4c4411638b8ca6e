"""Run one command to its end or a limit, and read what it printed. No path that it can change is ever opened."""

import contextlib
import functools
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from streamppo.errors import Retryable, TaskError
from streamppo.tasks.scorers import cgroup
from streamppo.tasks.scorers.launcher import FILE_BYTES

LAUNCHER = Path(__file__).with_name("launcher.py")
START_S = 5.0
"""Time that a sandbox has to start. None of it is the program's."""
LOOK_S = 0.02
"""Time between two looks at the memory of all processes of a program."""
SHARED_KIB = 16 * 2**10
"""Shared memory from which the parts of each process are told from what they have in common."""


class RunLimits(NamedTuple):
    """Bounds of one run. Memory is that of each process, and on Linux that of all processes of the program together."""

    timeout_s: float
    memory_mib: int = 512


class Ran(NamedTuple):
    """The end of a program. `exit_code` is None when it was killed at its time limit."""

    exit_code: int | None
    stdout: str
    stderr: str


class Place(NamedTuple):
    """Environment and folder of a command, and descriptors that it inherits."""

    env: Mapping[str, str]
    folder: str | None = None
    files: tuple[int, ...] = ()


class StartSignal:
    """A pipe by which the launcher says that the program begins: earlier ends are the sandbox's, not the program's."""

    def __enter__(self) -> "StartSignal":
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._begun = False
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        os.close(self.writer)

    def arguments(self, limits: RunLimits) -> list[str]:
        """Return the launcher's last arguments."""
        return [str(limits.memory_mib), str(int(limits.timeout_s) + 1), str(self.writer)]

    def has_begun(self) -> bool:
        """Find out whether the program began."""
        with contextlib.suppress(BlockingIOError):
            self._begun = self._begun or os.read(self._reader, 1) == b"1"
        return self._begun


def run(command: list[str], stdin: str, limits: RunLimits, started: StartSignal, place: Place) -> Ran:
    """Run a command whose last step is the launcher. Raises `TaskError` if the launcher never came to the program."""
    # Unlinked files: a pipe's other end may be held open by what the program has started, and a path be replaced.
    with (
        cgroup.group(limits.memory_mib) as group,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        process = subprocess.Popen(
            [*(group.enter if group else ()), *command],
            stdin=given,
            stdout=out,
            stderr=err,
            cwd=place.folder,
            env=place.env,
            pass_fds=(started.writer, *place.files),
            start_new_session=True,
        )
        try:
            exit_code, note = _end(process, limits, started)
            if group and not note and group.has_killed():
                note = _too_much(limits)
        finally:
            # Processes that the program has started are in its group, also when the program itself has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if group:
                group.kill()
            process.wait()
        said = _text(err)
        if not started.has_begun():
            if exit_code is None:
                raise Retryable(f"the sandbox did not start within {START_S:g} s")
            raise TaskError(f"the sandbox did not start: {said.strip()[-500:]}")
        return Ran(exit_code, _text(out), f"{said}{note}")


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), FILE_BYTES, 0).decode(errors="replace")


def _end(process: subprocess.Popen[bytes], limits: RunLimits, started: StartSignal) -> tuple[int | None, str]:
    """Wait: (exit code, note for people). None is the time limit, -9 with a note the memory of all processes."""
    end, begun = time.monotonic() + START_S, False
    while (left_s := end - time.monotonic()) > 0:
        if _ended(process, min(left_s, LOOK_S)):
            return process.wait(), ""
        if not begun and started.has_begun():
            end, begun = time.monotonic() + limits.timeout_s, True
        if memory_bytes(process.pid) > limits.memory_mib * 2**20:
            return -signal.SIGKILL, _too_much(limits)
    return None, ""


def _too_much(limits: RunLimits) -> str:
    return f"\nMemoryError: all its processes together had more than {limits.memory_mib} MiB"


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        watched, poll = os.pidfd_open(process.pid), select.poll()
    except (AttributeError, OSError):
        # Another system, an old kernel, or a filter around us.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return process.returncode is not None
    try:
        # `select.select` takes no descriptor above 1,023, and a process with many connections has more.
        poll.register(watched, select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s))
    finally:
        os.close(watched)


def memory_bytes(pid: int) -> int:
    """Sum up the memory of a process and its descendants; 0 where there is no Linux /proc.

    It is their resident memory that is no file's, what they share with each other once, and what their sockets may
    hold.
    """
    alone, shared, sockets = 0, 0, 0
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        # Processes end while they are looked at.
        with contextlib.suppress(OSError, ValueError, KeyError):
            for thread in os.listdir(f"/proc/{one}/task"):
                waiting += map(int, Path(f"/proc/{one}/task/{thread}/children").read_text().split())
            status = _kib(Path(f"/proc/{one}/status"))
            alone += status["RssAnon"] + status["VmSwap"]
            shared += status["RssShmem"]
            sockets += _sockets(one)
            found.append(one)
    if shared > SHARED_KIB:
        shared = sum(_shares(one) for one in found)
    return (alone + shared) * 2**10 + sockets * _socket_bytes()


def _kib(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().split("\n"))
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[2:] == ["kB"]}


def _shares(pid: int) -> int:
    """Return a process's part of the memory that it shares, in KiB: a page of n processes counts 1/n in each."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        try:
            return _kib(Path(f"/proc/{pid}/smaps_rollup"))["Pss_Shmem"]
        except PermissionError:
            return _kib(Path(f"/proc/{pid}/status"))["RssShmem"]
    return 0


def _sockets(pid: int) -> int:
    """Count the sockets of a process; 0 where another user, or the process, hides them."""
    count = 0
    with contextlib.suppress(OSError):
        for one in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(one.path).startswith("socket:")
    return count


@functools.cache
def _socket_bytes() -> int:
    """Return the bytes that may wait in one socket of a program."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    return 0
