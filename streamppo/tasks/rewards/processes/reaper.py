"""The parent of a reward's template: it kills all its descendants when the actor or the template has ended.

actor -> reaper -> template -> processes -> their children: forks, process pools, programs

Orphaned descendants of any session and group become the reaper's children (PR_SET_CHILD_SUBREAPER). SIGKILL also ends
stopped processes. When the actor ends, the kernel sends SIGCONT to the reaper, which may be stopped. A reaper needs
Linux. On other systems the template is the actor's child and ends when its socket closes.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from streamppo.process import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
CHECK_MS = 500
"""Time between two checks whether actor and template run, if the kernel offers no pidfd."""
ROUND_S, ROUNDS = 0.01, 500
"""Time between two rounds of kills, and the maximum number of rounds: processes may fork during a round."""


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant, so that `_descendants` finds it. Works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def fork_template() -> None:
    """Fork the template. The function returns in the template; this process becomes its reaper and never returns."""
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
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()
        os._exit(0)


def _wait(actor: int, template: int) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        # With SIGCHLD ignored, the kernel collects ended orphans.
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # Old kernels have no pidfd, and seccomp filters may refuse it.
    watched = list[int]()
    with suppress(OSError):
        watched += [os.pidfd_open(pid) for pid in (actor, template)]
    # Only the template may have its socket and its output open: the actor learns from their closing that it has ended.
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in watched:
            with suppress(OSError):
                os.close(int(name))
    poll = select.poll()
    for descriptor in watched:
        poll.register(descriptor, select.POLLIN)
    while os.getppid() == actor and _exists(template) and not poll.poll(None if watched else CHECK_MS):
        pass


def _exists(pid: int) -> bool:
    """Return True for a running process, and for an ended one that is not collected."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_descendants() -> None:
    """Kill and collect all descendants of this process, which adopts orphans, until none is left."""
    for _ in range(ROUNDS):
        pids = _descendants(os.getpid())
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(ROUND_S)


def _descendants(pid: int) -> list[int]:
    if sys.platform != "linux":
        import psutil

        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    descendants = [*children(pid)]
    for parent in descendants:
        descendants.extend(children(parent))
    return descendants


def children(pid: int) -> Iterator[int]:
    """Yield the children of a process from Linux's /proc, unless the process ends meanwhile."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            yield from map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
