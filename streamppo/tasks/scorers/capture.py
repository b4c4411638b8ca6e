"""Runs one command to its end or a limit, and reads its output. The module opens no path that the command controls."""

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
from streamppo.tasks.rewards.processes.reaper import children
from streamppo.tasks.scorers import cgroup
from streamppo.tasks.scorers.launcher import FILE_BYTES

LAUNCHER = Path(__file__).with_name("launcher.py")
START_S = 5.0
"""Time limit for the start of a sandbox. The start does not count as the program's time."""
CHECK_S = 0.02
"""Time between two checks of the memory of all processes of a program."""
SHARED_KIB = 16 * 2**10
"""If the shared memory of the processes adds up to more, a page that several processes share is counted once."""


class RunLimits(NamedTuple):
    """Bounds of one run. `memory_mib` bounds each process, and on Linux also all processes of the program together."""

    timeout_s: float
    memory_mib: int = 512


class Ran(NamedTuple):
    """The result of a program. `exit_code` is None if the program was killed at its time limit."""

    exit_code: int | None
    stdout: str
    stderr: str


class StartSignal:
    """A pipe on which the launcher signals that the program begins. Without the signal the sandbox has failed."""

    def __enter__(self) -> "StartSignal":
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._begun = False
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        os.close(self.writer)

    def arguments(self, limits: RunLimits) -> list[str]:
        return [str(limits.memory_mib), str(int(limits.timeout_s) + 1), str(self.writer)]

    def has_begun(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._begun = self._begun or os.read(self._reader, 1) == b"1"
        return self._begun


def run(
    command: list[str],
    stdin: str,
    limits: RunLimits,
    started: StartSignal,
    *,
    env: Mapping[str, str],
    folder: str,
    files: tuple[int, ...] = (),
) -> Ran:
    """Run a command that ends with the launcher. Raises `Retryable` or `TaskError` if the program did not begin."""
    # Input and output are files, because the program's descendants could hold a pipe open. The files have no path,
    # because descendants could replace a path.
    with (
        cgroup.group(limits.memory_mib) as group,
        tempfile.TemporaryFile() as stdin_file,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        stdin_file.write(stdin.encode(errors="replace"))
        stdin_file.seek(0)
        process = subprocess.Popen(
            [*(group.enter if group else ()), *command],
            stdin=stdin_file,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=env,
            pass_fds=(started.writer, *files),
            start_new_session=True,
        )
        try:
            exit_code, note = _wait(process, limits, started)
            if group and not note and group.has_killed():
                note = _memory_note(limits)
        finally:
            # The program's children are in its process group, even after the program itself has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if group:
                group.kill()
            process.wait()
        error_text = _text(err)
        if not started.has_begun():
            if exit_code is None:
                raise Retryable(f"the sandbox did not start within {START_S:g} s")
            raise TaskError(f"the sandbox did not start: {error_text.strip()[-500:]}")
        return Ran(exit_code, _text(out), f"{error_text}{note}")


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), FILE_BYTES, 0).decode(errors="replace")


def _wait(process: subprocess.Popen[bytes], limits: RunLimits, started: StartSignal) -> tuple[int | None, str]:
    """Return (exit code, note). The code is None at the time limit, and -9, with a note, at the memory limit."""
    end, begun = time.monotonic() + START_S, False
    while (left_s := end - time.monotonic()) > 0:
        if _has_ended(process, min(left_s, CHECK_S)):
            return process.wait(), ""
        if not begun and started.has_begun():
            end, begun = time.monotonic() + limits.timeout_s, True
        if memory_bytes(process.pid) > limits.memory_mib * 2**20:
            return -signal.SIGKILL, _memory_note(limits)
    return None, ""


def _memory_note(limits: RunLimits) -> str:
    return f"\nMemoryError: all its processes together had more than {limits.memory_mib} MiB"


def _has_ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        watched, poll = os.pidfd_open(process.pid), select.poll()
    except (AttributeError, OSError):
        # Other systems and old kernels have no pidfd, and seccomp filters may refuse it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return process.returncode is not None
    try:
        # `select.select` accepts no descriptor above 1,023, and this process may have more.
        poll.register(watched, select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s))
    finally:
        os.close(watched)


def memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants: private, shared (once) and sockets; 0 without /proc."""
    private, shared, sockets = 0, 0, 0
    members = [pid]
    for member in members:
        members.extend(children(member))
        # A process may end meanwhile.
        with contextlib.suppress(OSError, ValueError, KeyError):
            status = _kib(Path(f"/proc/{member}/status"))
            private += status["RssAnon"] + status["VmSwap"]
            shared += status["RssShmem"]
            sockets += _sockets(member)
    if shared > SHARED_KIB:
        shared = sum(_shares(member) for member in members)
    return (private + shared) * 2**10 + sockets * _socket_bytes()


def _kib(path: Path) -> dict[str, int]:
    # The file has the process's name, which the program chooses: it may not be UTF-8, or may look like an amount of
    # memory.
    rows = (line.split() for line in path.read_bytes().split(b"\n"))
    amounts = (row for row in rows if row[2:] == [b"kB"] and row[1].isdigit())
    return {name.decode().rstrip(":"): int(kib) for name, kib, _ in amounts}


def _shares(pid: int) -> int:
    """Return a process's share of shared memory in KiB: a page that n processes share counts 1/n in each."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        try:
            return _kib(Path(f"/proc/{pid}/smaps_rollup"))["Pss_Shmem"]
        except PermissionError:
            return _kib(Path(f"/proc/{pid}/status"))["RssShmem"]
    return 0


def _sockets(pid: int) -> int:
    count = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(entry.path).startswith("socket:")
    return count


@functools.cache
def _socket_bytes() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    return 0
