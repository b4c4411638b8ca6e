"""Ends the processes of a run's own Ray that survive their driver.

Ray's raylet dies with the driver, and its children (agents, actors and their processes) end when they notice its death.
A child that is stopped or waits for Ray does not notice it. So `kill_at_end` starts a watcher process, which kills
every process that inherited the mark when the driver or the block ends in any way. A program that was started with
another environment is not found.

This file runs as a script with only Python's standard library. The watcher needs Linux.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

MARK = "STREAMPPO_OWN_RAY"
"""The environment variable that all processes of a run's own Ray inherit."""
ROUND_S, ROUNDS = 0.02, 500
"""Each round scans all processes, and then watches for new processes for `ROUND_S`. `ROUNDS` limits the rounds."""
EMPTY_ROUNDS = 3
"""The watcher ends after so many successive scans without a marked process. A process that forks may evade a scan."""
LOOK_MS = 500
"""Milliseconds between two checks for the driver, if the kernel has no pidfd."""
ENDING_S = 15.0
"""Seconds for which `kill_at_end` waits, at the end of its block, until the watcher has killed all processes."""


@contextmanager
def kill_at_end() -> Generator[str]:
    """Yield a value for `MARK`. Kill every process with that value when the block or this process ends."""
    value = f"{os.getpid()}-{uuid4().hex}"
    if sys.platform != "linux":
        yield value
        return
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), value]
    # In a session of its own, the watcher gets no signals of the driver's group, such as those of a terminal.
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield value
    finally:
        with suppress(subprocess.TimeoutExpired, OSError):
            watcher.communicate(timeout=ENDING_S)


def marked_processes(value: str) -> Iterator[int]:
    """Yield the pids of this user's live processes with `value` in `MARK`, the highest pid first."""
    # A caller that kills each process at once then rarely misses a child of a process that forks and exits.
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        if _is_marked(pid, value):
            yield pid


def _is_marked(pid: int, value: str) -> bool:
    # A process may end meanwhile, and other users' environments cannot be read.
    with suppress(OSError):
        return f"{MARK}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _wait(driver: int) -> None:
    """Wait until the driver (our parent) ends, or until standard input, which the driver holds open, ends."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    try:
        poll.register(os.pidfd_open(driver), select.POLLIN)
        poll.poll()
    except ProcessLookupError:
        return
    # Old kernels and seccomp filters have no pidfd. A child that the driver forked may hold our standard input open.
    except OSError:
        while not poll.poll(LOOK_MS) and os.getppid() == driver:
            pass


def _main(driver: int, value: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait(driver)
    empty = 0
    for _ in range(ROUNDS):
        newest = _newest_pid()
        killed = _kill(marked_processes(value)) + _kill_at_birth(newest, value)
        empty = 0 if killed else empty + 1
        if empty == EMPTY_ROUNDS:
            return


def _kill(pids: Iterator[int]) -> int:
    count = 0
    for pid in pids:
        count += 1
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return count


def _kill_at_birth(newest: int, value: str) -> int:
    """For `ROUND_S`, kill marked processes that start after `newest`, before they exit again; return their number."""
    count, deadline = 0, time.monotonic() + ROUND_S
    while time.monotonic() < deadline:
        last, newest = newest, _newest_pid()
        born = range(last + 1, newest + 1) if last <= newest else range(1, newest + 1)  # pids restart at 1
        count += _kill(pid for pid in born if _is_marked(pid, value))
    return count


def _newest_pid() -> int:
    return int(Path("/proc/loadavg").read_text().split()[-1])


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
