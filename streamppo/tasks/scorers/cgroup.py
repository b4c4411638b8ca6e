"""Makes a cgroup (version 2) for each program, if possible: the kernel then bounds its memory and processes.

    .../user@1000.service/app.slice            writable, and delegates `memory` and `pids`: groups are made here
    .../app.slice/run-4711.scope               this process
    .../app.slice/streamppo-4711-5e6f7a8b      a program, with all that it starts

capture.py measures the memory of all processes every 20 ms and enforces a program's limit. The higher limits of the
group cover what the measurements miss: memory used between two measurements, pipes full of data, children that have
left the tree of processes. With cgroups of version 1, and in most containers, no group can be made.
"""

import functools
import os
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from streamppo import durable

PROCESS_GROUP, MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")
CONTROLLERS = frozenset({"memory", "pids"})
NAME = "streamppo"
SPARE_MIB = 256
"""Memory that the kernel counts and capture.py does not: files in /tmp and /dev/shm, page tables, file caches."""
TASKS = 512
"""Maximum number of processes and threads of a group. In `Local`, numpy alone starts a thread for each core."""
ENTER = '{ echo 0 > "$0"; } 2>/dev/null; exec "$@"'
"""A shell command that moves its process into the group and then executes the command in its arguments."""
REMOVED_S = 1.0
"""Time for killed processes to leave their group."""


class ControlGroup:
    """The cgroup whose folder is `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def enter(self) -> list[str]:
        """The prefix of a command that then runs in the group, or outside the group if it may not enter."""
        return ["/bin/sh", "-c", ENTER, str(self.folder / "cgroup.procs")]

    def has_killed(self) -> bool:
        """Return True if the kernel has killed the group for its use of memory."""
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            return counts.get("oom_kill", "0") != "0"
        return False

    def kill(self) -> None:
        with suppress(OSError):
            (self.folder / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Remove the group when it is empty. A group that stays too long is removed by a later process."""
        end = time.monotonic() + REMOVED_S
        while time.monotonic() < end:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.002)


@contextmanager
def group(memory_mib: int) -> Generator[ControlGroup | None]:
    """Make a group for a program with `memory_mib`, and remove it after the block; None if none can be made."""
    level = parent_group()
    program_group = _make(level, memory_mib) if level is not None else None
    try:
        yield program_group
    finally:
        if program_group is not None:
            program_group.remove()


@functools.cache
def parent_group() -> Path | None:
    """Find the nearest cgroup around this process in which groups with limits can be made; None if there is none."""
    with suppress(OSError):
        for level in levels(durable.read_kernel(PROCESS_GROUP), durable.read_kernel(MOUNTS)):
            if _delegates(level) and _is_usable(level):
                return level
    return None


def levels(cgroup_lines: str, mounts: str) -> Iterator[Path]:
    """Yield the cgroups around a process, the nearest first, from its /proc files cgroup and mountinfo (proc(5))."""
    path = next((line.removeprefix("0::") for line in cgroup_lines.splitlines() if line.startswith("0::")), "..")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, point = map(durable.mount_point, before.split()[3:5])
        # A mount may show only a part of the tree that does not contain the process.
        if after.split()[0] == "cgroup2" and ".." not in Path(path).parts and Path(path).is_relative_to(root):
            folder = Path(point, Path(path).relative_to(root))
            yield from (folder, *folder.parents[: len(Path(path).relative_to(root).parts)])


def _delegates(level: Path) -> bool:
    try:
        delegated = (level / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    # Moving a process needs write access to the common parent group.
    return set(delegated) >= CONTROLLERS and os.access(level, os.W_OK) and os.access(level / "cgroup.procs", os.W_OK)


def _is_usable(level: Path) -> bool:
    """Return True if a process can enter a new group in `level`. Removes the groups of dead processes."""
    for old in level.glob(f"{NAME}-*-*"):
        with suppress(OSError):
            if not Path("/proc", old.name.split("-")[1]).exists():
                old.rmdir()
    test_group = _make(level, SPARE_MIB)
    if test_group is None:
        return False
    try:
        ran = subprocess.run(
            [*test_group.enter, "cat", str(PROCESS_GROUP)], capture_output=True, text=True, check=False
        )
    finally:
        test_group.remove()
    return test_group.folder.name in ran.stdout


def _make(level: Path, memory_mib: int) -> ControlGroup | None:
    folder = level / f"{NAME}-{os.getpid()}-{uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        for name, value in limits(memory_mib).items():
            (folder / name).write_text(value)
        # A machine without swap lacks this file.
        with suppress(OSError):
            (folder / "memory.swap.max").write_text("0")
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return None
    return ControlGroup(folder)


def limits(memory_mib: int) -> dict[str, str]:
    """Return the contents of a group's files. The kernel slows processes above memory.high, and kills at memory.max."""
    high = (memory_mib + SPARE_MIB) * 2**20
    return {
        "memory.high": f"{high}",
        "memory.max": f"{high + SPARE_MIB * 2**20}",
        "memory.oom.group": "1",
        "pids.max": f"{TASKS}",
    }
