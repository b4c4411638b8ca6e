"""Run program.py of the current folder under limits: walled|require|try PARENT_PID MEMORY_MIB CPU_S READY.

`walled` says that a sandbox of its own is around this process already. A byte goes to the descriptor READY when
everything stands and the program begins. Imports nothing of ours.
"""

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG = 1
FILE_BYTES = 16 * 2**20
PROCESSES = 64


def main(around: str, parent: int, memory_mib: int, cpu_s: int, ready: int) -> None:
    """Give up the network, outliving the parent, memory, CPU time, file size and processes, then run."""
    alone = around == "walled" or _leave_network()
    if not alone and around == "require":
        sys.exit("the kernel allows no network namespace, and require_no_network is set")
    if around != "walled":
        _die_with(parent)
    memory = memory_mib * 2**20
    for what, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        # Outside of a user namespace this would count all processes of the user.
        *([(resource.RLIMIT_NPROC, PROCESSES)] if alone else []),
    ):
        with contextlib.suppress(ValueError):
            resource.setrlimit(what, (limit, limit))
    os.write(ready, b"1")
    os.close(ready)
    sys.argv = ["program.py"]
    sys.path[:0] = [os.getcwd()]
    runpy.run_path("program.py", run_name="__main__")


def _leave_network() -> bool:
    """Enter a network namespace of our own, in which no interface is up; False where the kernel allows none."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. A new user namespace would undo that: enter it before."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("its parent has ended")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
