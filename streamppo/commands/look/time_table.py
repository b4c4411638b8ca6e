"""Show people where the time of a run goes: every phase of every process, for one update."""

from pathlib import Path

from streamppo.commands.console import echo
from streamppo.errors import RunError
from streamppo.process import WHOLE
from streamppo.telemetry import metrics_file, phase_times
from streamppo.telemetry.catalogue import PHASES


def show(run: Path) -> int:
    """Print milliseconds for one update, by process, the largest part first. Raises `RunError` where none is known."""
    found = phase_times.per_update(metrics_file.read(run))
    if not found:
        raise RunError(f"{run}: no process has told of its phases yet; the first does after about ten seconds")
    for process, phases in sorted(found.items()):
        whole = phases[WHOLE].cpu_ms
        echo(f"{process}: {whole:.1f} ms of CPU for one update")
        echo(f"  {'phase':10} {'calls':>7} {'wall ms':>9} {'CPU ms':>9} {'share':>6}")
        rows = sorted(((name, one) for name, one in phases.items() if name != WHOLE), key=lambda row: -row[1].cpu_ms)
        for name, one in rows:
            meaning = PHASES[name].partition(": ")[2] if name in PHASES else "overhead, other threads, and Ray"
            numbers = f"{one.calls:7.1f} {one.wall_ms:9.2f} {one.cpu_ms:9.2f} {one.cpu_ms / max(whole, 1e-9):6.0%}"
            echo(f"  {name:10} {numbers}  {meaning}")
    return 0
