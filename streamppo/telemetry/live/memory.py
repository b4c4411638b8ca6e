"""Memory of this machine, or of the driver's container."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""Mount point of a container's own cgroup."""
GIB = 2**30


def memory_in_use() -> tuple[float, float] | None:
    """Return (used without droppable files, total) memory in GiB; None if it cannot be read."""
    try:
        return _machine(CGROUP, MEMINFO)
    except (OSError, ValueError, KeyError):
        return None


def _machine(cgroup: Path, meminfo: Path) -> tuple[float, float]:
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = cgroup / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()).isdigit() and int(text) < total:
        total, counts = int(text), dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        held = int((cgroup / "memory.current").read_text())
        return (held - int(counts["inactive_file"])) / GIB, total / GIB
    return (total - free) / GIB, total / GIB
