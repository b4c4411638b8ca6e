"""Runs program.py of the current folder under limits: walled|require|try PARENT_PID MEMORY_MIB CPU_S READY.

`walled`: this process is already inside a sandbox. `require` and `try`: leave the network; if the kernel refuses,
`require` ends the process. A byte is written to the descriptor READY when all limits are set and the program begins.
This file imports no other module of ours.
"""

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import struct
import sys

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
FILE_BYTES = 16 * 2**20
PROCESSES = 64
FILES = 256
"""Maximum number of a process's descriptors: each may be a socket full of data."""
ENOSYS = 38
UNACCOUNTED_CALLS = {
    "x86_64": (0xC000003E, [29, 64, 68, 240, 248, 249, 250, 298, 319, 321, 323, 425, 447]),
    "aarch64": (0xC00000B7, [180, 186, 190, 194, 217, 218, 219, 241, 279, 280, 282, 425, 447]),
}
"""The kernel's architecture number, and its system calls for memory that no process or file system accounts for:
shmget, semget, msgget, mq_open, add_key, request_key, keyctl, perf_event_open, memfd_create, bpf, userfaultfd,
io_uring_setup, memfd_secret (x86-64's order)."""


def main(around: str, parent: int, memory_mib: int, cpu_s: int, ready: int) -> None:
    """Leave the network, end with the parent, limit memory, CPU time, file size and processes; then run the program."""
    has_no_network = around == "walled" or _leave_network()
    if not has_no_network and around == "require":
        sys.exit("the kernel allows no network namespace, and require_no_network is set")
    if around != "walled":
        _die_with(parent)
    memory = memory_mib * 2**20
    for resource_kind, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, FILES),
        # Outside a user namespace this limit would count all processes of the user.
        *([(resource.RLIMIT_NPROC, PROCESSES)] if has_no_network else []),
    ):
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource_kind, (limit, limit))
    refuse_unaccounted_calls()
    os.write(ready, b"1")
    os.close(ready)
    sys.argv = ["program.py"]
    sys.path[:0] = [os.getcwd()]
    runpy.run_path("program.py", run_name="__main__")


def _leave_network() -> bool:
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC) == 0


def refuse_unaccounted_calls() -> bool:
    """Make the system calls in `UNACCOUNTED_CALLS` fail with ENOSYS; False if the kernel allows no seccomp filter."""
    if sys.platform != "linux" or not (code := unaccounted_calls_filter(os.uname().machine)):
        return False
    buffer = ctypes.create_string_buffer(code)
    filters = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.prctl(PR_SET_SECCOMP, 2, filters, 0, 0) == 0


def unaccounted_calls_filter(machine: str) -> bytes:
    """Return the BPF program that refuses `UNACCOUNTED_CALLS` and other architectures; empty for an unknown machine."""
    arch, numbers = UNACCOUNTED_CALLS.get(machine, (0, []))
    if not numbers:
        return b""
    # The program reads struct seccomp_data: nr (offset 0) and arch (4). Instructions are (code, jump if true, if false,
    # operand).
    load, equal, at_least, ret = 0x20, 0x15, 0x35, 0x06
    allow, refuse = (ret, 0, 0, 0x7FFF0000), (ret, 0, 0, 0x00050000 | ENOSYS)
    count = len(numbers)
    # Numbers from 2**30 are x32 variants of the same calls, and are refused too.
    program = [(load, 0, 0, 4), (equal, 0, count + 3, arch), (load, 0, 0, 0), (at_least, count + 1, 0, 0x40000000)]
    program += [(equal, count - place, 0, number) for place, number in enumerate(numbers)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, allow, refuse])


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends. Call `_leave_network` first, because it resets this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("its parent has ended")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
