"""Ends the processes of a run's own Ray that outlive their driver.

Ray's raylet dies with the driver. The processes that it started (agents, actors, their children) check for it
themselves, but not while they are stopped or wait for the lost Ray. `ends` therefore starts a watcher process. When the
driver or the block ends, for whatever reason, the watcher kills every process that inherited the mark. The mark alone
identifies them, because orphans have lost their parent. A program that was started with another environment is not
found.

This file runs as a script, with only Python's standard library. The watcher needs Linux; elsewhere only Ray's own
cleanup works.
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
"""Time between two rounds of kills, and the number of rounds: processes may fork while they are killed."""
LOOK_MS = 500
"""Time between two checks for the driver, if the kernel offers no pidfd."""
ENDING_S = 15.0
"""How long the block's end waits for the last process to end."""


@contextmanager
def ends() -> Generator[str]:
    """Kill every process whose `MARK` has the value yielded here, when the block or this process ends."""
    value = f"{os.getpid()}-{uuid4().hex}"
    if sys.platform != "linux":
        yield value
        return
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), value]
    # In a session of its own it gets no signals of the driver's group, such as a terminal's.
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield value
    finally:
        with suppress(subprocess.TimeoutExpired, OSError):
            watcher.communicate(timeout=ENDING_S)


def marked_processes(value: str) -> Iterator[int]:
    """Yield the pids of this user's live processes that inherited `MARK` with `value`, the highest pid first.

    A caller that kills each at once then rarely misses a child of a process that forks and exits.
    """
    mark = f"{MARK}={value}".encode()
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        # A process may end meanwhile, and other users' environments cannot be read.
        with suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield pid


def _wait(driver: int) -> None:
    """Wait for the end of standard input, which the driver holds open, or for the end of the driver, our parent."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    try:
        poll.register(os.pidfd_open(driver), select.POLLIN)
        poll.poll()
    except ProcessLookupError:
        return
    # Old kernels and seccomp filters have no pidfd. A child forked by the driver may hold our standard input open.
    except OSError:
        while not poll.poll(LOOK_MS) and os.getppid() == driver:
            pass


def _main(driver: int, value: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait(driver)
    for _ in range(ROUNDS):
        any_left = False
        for pid in marked_processes(value):
            any_left = True
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not any_left:
            return
        time.sleep(ROUND_S)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
