"""Computes the time per update of each phase of a run's processes from metrics.jsonl."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from streamppo.process import WHOLE
from streamppo.telemetry.metrics_file import Line, PhasesLine

Spending: TypeAlias = tuple[int, float, float]
"""Calls, wall seconds and CPU seconds of a phase, as in a line of metrics.jsonl."""
NOTHING: Spending = (0, 0.0, 0.0)
ELSEWHERE = "elsewhere"
"""The name for the CPU time of a process outside its phases: overhead, other threads, and Ray."""


class PerUpdate(NamedTuple):
    """Calls, wall milliseconds and CPU milliseconds of a phase, divided by the updates made while its process ran."""

    calls: float
    wall_ms: float
    cpu_ms: float


def per_update(lines: Sequence[Line]) -> dict[str, dict[str, PerUpdate]]:
    """Return the time per update of each process, for each phase and for `ELSEWHERE`.

    The interval of a process is from its first line to its newest line or, if there is only one line, from its start to
    this line. A process without an update in its interval is left out.
    """
    timed = [line for line in lines if "phases" in line]
    made_at = [line["wall_s"] for line in lines if "update" in line]
    by_process: dict[str, dict[str, PerUpdate]] = {}
    for process, last in {line["phases"]: line for line in timed}.items():
        first = next(line for line in timed if line["phases"] == process and (line is last or is_same(line, last)))
        since, before = (_began(last), {}) if first is last else (first["wall_s"], first["spent"])
        if updates := sum(since <= at <= last["wall_s"] for at in made_at):
            by_process[process] = _divided(between(before, last["spent"]), updates)
    return by_process


def is_same(before: PhasesLine, after: PhasesLine) -> bool:
    """Return whether the process of line `after` also wrote `before`: a process that was restarted began later."""
    return _began(after) <= before["wall_s"]


def _began(line: PhasesLine) -> float:
    """Return the second of the run at which the line's process began; the line's own second if `WHOLE` is missing."""
    return line["wall_s"] - line["spent"].get(WHOLE, NOTHING)[1]


def between(before: Mapping[str, Spending], after: Mapping[str, Spending]) -> dict[str, Spending]:
    """Return the time that a process spent in each phase between two of its lines."""
    return {
        name: (calls - then[0], wall_s - then[1], cpu_s - then[2])
        for name, (calls, wall_s, cpu_s) in after.items()
        for then in [before.get(name, NOTHING)]
    }


def _divided(spent: Mapping[str, Spending], updates: int) -> dict[str, PerUpdate]:
    by_phase = {
        name: PerUpdate(calls / updates, 1e3 * wall_s / updates, 1e3 * cpu_s / updates)
        for name, (calls, wall_s, cpu_s) in spent.items()
    }
    phases_ms = sum(phase.cpu_ms for name, phase in by_phase.items() if name != WHOLE)
    return {**by_phase, ELSEWHERE: PerUpdate(0.0, 0.0, by_phase[WHOLE].cpu_ms - phases_ms)}
