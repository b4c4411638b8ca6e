"""The time that the phases of a run's processes take for each update, from the lines of metrics.jsonl."""

from collections.abc import Sequence
from typing import NamedTuple

from streamppo.process import WHOLE
from streamppo.telemetry.metrics_file import Line

ELSEWHERE = "elsewhere"
"""CPU time of a process outside of its phases: overhead, other threads, and Ray."""


class PerUpdate(NamedTuple):
    """Time of a phase for each update that was made while its process lived; calls, wall and CPU milliseconds."""

    calls: float
    wall_ms: float
    cpu_ms: float


def per_update(lines: Sequence[Line]) -> dict[str, dict[str, PerUpdate]]:
    """The newest phases of every process, and the rest of its CPU time; no process that saw no update."""
    newest = {line["phases"]: line for line in lines if "phases" in line}
    made_at = [line["wall_s"] for line in lines if "update" in line]
    found: dict[str, dict[str, PerUpdate]] = {}
    for process, line in newest.items():
        spent, end = line["spent"], line["wall_s"]
        _, lived_s, process_cpu_s = spent.get(WHOLE, (0, 0.0, 0.0))
        updates = sum(end - lived_s <= at <= end for at in made_at)
        if not updates:
            continue
        rest_s = process_cpu_s - sum(cpu_s for name, (_, _, cpu_s) in spent.items() if name != WHOLE)
        found[process] = {
            name: PerUpdate(calls / updates, 1e3 * wall_s / updates, 1e3 * cpu_s / updates)
            for name, (calls, wall_s, cpu_s) in spent.items()
        }
        found[process][ELSEWHERE] = PerUpdate(0.0, 0.0, 1e3 * rest_s / updates)
    return found
