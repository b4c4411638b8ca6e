"""Processes of a run's own Ray that outlive their driver, and the process that ends them.

Ray's raylet dies with the driver; what it started (agents, actors, their children) looks for it by itself, and does not
where it is stopped or waits for a Ray that is gone. The process `ends` starts stands beside the driver, and when the
driver or the block ends, however it ends, it kills every process that inherited the mark. It knows them by the mark
alone: orphans have no parent to be found by. A program that is started with an environment of its own is not found.

This file is run by itself, with Python's standard library alone. Linux has what it needs; elsewhere Ray's own means
are all there is.
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
"""The variable of the environment that all processes of a run's own Ray inherit."""
ROUND_S, ROUNDS = 0.02, 500
"""Between two looks for what is left, and so many looks: processes may fork while they are killed."""
LOOK_MS = 500
"""Between two looks for the driver, where the kernel does not tell of its end."""
ENDING_S = 15.0
"""How long the block's end waits for the last process to end."""


@contextmanager
def ends() -> Generator[str]:
    """Kill every process that has `MARK` with the value given to the block, when the block or this process ends."""
    value = f"{os.getpid()}-{uuid4().hex}"
    if sys.platform != "linux":
        yield value
        return
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), value]
    # Signals to the driver's group, such as a terminal's, are not meant for it.
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield value
    finally:
        with suppress(subprocess.TimeoutExpired, OSError):
            watcher.communicate(timeout=ENDING_S)


def marked_processes(value: str) -> Iterator[int]:
    """Yield the living processes of this user that inherited `MARK` with `value`, those of the highest number first.

    A caller that ends each at once hardly misses one that forks and ends.
    """
    wanted = f"{MARK}={value}".encode()
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        # Processes end while they are looked at, and others' are not ours to see.
        with suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
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
    # An old kernel, or a filter around us. A child that the driver forked may hold our standard input open.
    except OSError:
        while not poll.poll(LOOK_MS) and os.getppid() == driver:
            pass


def _main(driver: int, value: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait(driver)
    for _ in range(ROUNDS):
        found = False
        for pid in marked_processes(value):
            found = True
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(ROUND_S)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
