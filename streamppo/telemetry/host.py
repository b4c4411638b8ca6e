"""Reads the cores and the memory that this process may use, the memory in use, and kills for lack of memory.

A container limits them by its cgroup, of version 1 or 2. The files for memory:

version 2    CGROUP/memory.events "oom_kill 3"         CGROUP/memory.max               CGROUP/memory.current
version 1    CGROUP/memory.oom_control "oom_kill 3"    CGROUP/memory.limit_in_bytes    CGROUP/memory.usage_in_bytes

The memory in use is without cached files, "inactive_file" or "total_inactive_file" of CGROUP/memory.stat.
"""

import os
from contextlib import suppress
from pathlib import Path

from streamppo import durable

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
COUNTERS = {"memory.events": "memory.max", "memory.oom_control": "memory.limit_in_bytes"}
"""For each version: the file with the number of kills, and the file with the memory limit."""
USED = {"memory.current": "inactive_file", "memory.usage_in_bytes": "total_inactive_file"}
"""For each version: the file with the memory in use, and the name of cached files in memory.stat."""
MEMINFO = Path("/proc/meminfo")
GIB = 2**30
UNLIMITED = 2**60
"""Version 1 reports a limit above this number if there is no limit."""


def cores() -> int:
    """Return the number of cores that the process's affinity and the container's quota allow."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, _quota() or count)


def _quota() -> int | None:
    """Return the number of cores that the container's cgroup (version 2 or 1) allows; None without a limit."""
    with suppress(OSError, ValueError):
        allowed, period = (CGROUPS / "cpu.max").read_text().split()
        return None if allowed == "max" else max(1, int(allowed) // int(period))
    with suppress(OSError, ValueError):
        allowed = int((CGROUPS / "cpu" / "cpu.cfs_quota_us").read_text())
        period = int((CGROUPS / "cpu" / "cpu.cfs_period_us").read_text())
        return None if allowed < 0 else max(1, allowed // period)
    return None


class MemoryKills:
    """Counts kills since this object was created, in this process's cgroup and its parents, whose limits also apply."""

    def __init__(self, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> None:
        self._levels = _levels(cgroups, durable.read_kernel(membership))
        self._reported = self._count()

    def explain(self) -> str:
        """Describe the memory kills since the last call, with the memory limit; "" if there were none."""
        before, self._reported = self._reported, self._count()
        if self._reported <= before:
            return ""
        limits = [limit for level in self._levels if (limit := _limit(level)) is not None]
        limit_text = f": the limit of the cgroup is {min(limits) / 2**30:.2f} GiB" if limits else ""
        return f"killed by the kernel, out of memory{limit_text}"

    def _count(self) -> int:
        return sum(map(_kills, self._levels))


def total_mib() -> int:
    """Return the memory of this machine or, if it is less, of its container."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, limit() or physical) // 2**20


def limit(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Return the smallest memory limit in bytes of this process's cgroups; None without a limit."""
    levels = _levels(cgroups, durable.read_kernel(membership))
    return min((at_level for level in levels if (at_level := _limit(level)) is not None), default=None)


def memory_in_use(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> tuple[float, float] | None:
    """Return (used memory without caches, total memory or the smallest limit of the cgroups) in GiB, or None."""
    try:
        rows = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        total, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        levels = _levels(cgroups, durable.read_kernel(membership))
        limits = [(at_level, level) for level in levels if (at_level := _limit(level) or total) < total]
        smallest, used = (
            min((at_level, _used(level)) for at_level, level in limits) if limits else (total, total - free)
        )
    except (OSError, ValueError, KeyError):
        return None
    return used / GIB, smallest / GIB


def _levels(cgroups: Path, memberships: str) -> list[Path]:
    """Return the folders that count kills: a process's memory cgroup and its parents."""
    levels: list[Path] = []
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root = cgroups / controllers
        folder = root / path.lstrip("/")
        levels += [level for level in (folder, *folder.parents) if level.is_relative_to(root)]
    return [level for level in levels if any((level / name).is_file() for name in COUNTERS)]


def _kills(level: Path) -> int:
    for name in COUNTERS:
        if (level / name).is_file():
            counts = dict(line.split() for line in (level / name).read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def _limit(level: Path) -> int | None:
    for name in COUNTERS.values():
        if (level / name).is_file():
            text = (level / name).read_text().strip()
            return int(text) if text.isdigit() and int(text) < UNLIMITED else None
    return None


def _used(level: Path) -> int:
    counts = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
    (name,) = [name for name in USED if (level / name).is_file()]
    return int((level / name).read_text()) - int(counts[USED[name]])
