"""The parent of a reward's template: it ends everything below it when the actor, or the template, has ended.

    actor -> reaper -> template -> processes -> whatever a reward starts: forks, process pools, programs

Orphans below it become its children (PR_SET_CHILD_SUBREAPER), whatever their session and group; a SIGKILL ends
stopped processes too. A stopped reaper is continued as its actor ends. Linux alone has this; elsewhere the template is
the actor's child, and ends when its socket does.
"""

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from streamppo.process import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
LOOK_MS = 500
"""Between two looks for actor and template, where the kernel does not tell of their end."""
ROUND_S, ROUNDS = 0.01, 500
"""Between two looks for what is left below, and so many looks: processes may fork while they are killed."""


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process, so that it is found. Linux alone has this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def stand() -> None:
    """Return in a fork of this process, of which this process becomes the reaper."""
    if sys.platform != "linux":
        return
    actor, reaper = os.getppid(), os.getpid()
    die_with_parent(signal.SIGCONT)
    adopt_orphans()
    template = os.fork()
    if template == 0:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(1)
        return
    try:
        _wait(actor, template)
    finally:
        _end_all()
        os._exit(0)


def _wait(actor: int, template: int) -> None:
    """Wait for the end of either, or for SIGTERM."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        # With SIGCHLD ignored, orphans that have ended are collected by the kernel.
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # An old kernel, or a filter around us, gives none.
    watched = list[int]()
    with suppress(OSError):
        watched += [os.pidfd_open(pid) for pid in (actor, template)]
    # Sockets and output are the template's alone: their ends say that it has ended.
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in watched:
            with suppress(OSError):
                os.close(int(name))
    poll = select.poll()
    for one in watched:
        poll.register(one, select.POLLIN)
    while os.getppid() == actor and _lives(template) and not poll.poll(None if watched else LOOK_MS):
        pass


def _lives(pid: int) -> bool:
    """True for a process that has not ended, or is not collected yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end_all() -> None:
    """Kill everything below this process, until nothing is there."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(ROUNDS):
        found = _below(os.getpid())
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(ROUND_S)


def _below(pid: int) -> list[int]:
    """The processes that descend from `pid`."""
    found, waiting = list[int](), [pid]
    while waiting:
        one = waiting.pop()
        # Processes end while they are looked at.
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                children = [*map(int, Path(f"/proc/{one}/task/{thread}/children").read_text().split())]
                found += children
                waiting += children
    return found
