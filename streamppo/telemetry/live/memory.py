"""Memory of this machine, or of the container that the driver is in."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
"""In a container, its own cgroup is mounted here."""
GIB = 2**30


def memory_in_use() -> tuple[float, float] | None:
    """Return the memory in use, without files that can be dropped, and all there is, in GiB; None if nothing tells."""
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
