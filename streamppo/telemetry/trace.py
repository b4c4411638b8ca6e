"""Converts a run's lines to Chromium's Trace Event Format, for Perfetto: slices, instants and counters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from streamppo.process import WHOLE
from streamppo.telemetry import phase_times, timeline
from streamppo.telemetry.metrics_file import Line, PhasesLine, UpdateLine

Event: TypeAlias = Mapping[str, object]
PROCESS = 1
LANES = ("driver", "learner", "push", "evaluation")
"""The lanes of slices and instants, from top to bottom."""
INSIDE = ("wait_s", "score_s", "train_s")
"""The parts of an update, in their order."""
SHOWN = ("reward", "lag_mean", "lag_max", "ess", "entropy", "tokens_trained", "grad_norm")


def events(lines: Sequence[Line], name: str) -> list[Event]:
    """Return all events of the run `name`, ordered by start time."""
    named: list[Event] = [_named("process_name", 0, name)]
    named += [_named("thread_name", lane, title) for lane, title in enumerate(LANES)]
    timed = [*_slices(lines), *_instants(lines), *_counters(lines)]
    return named + sorted(timed, key=lambda event: _number(event["ts"]))


def _named(kind: str, lane: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": PROCESS, "tid": lane, "args": {"name": name}}


def _slices(lines: Sequence[Line]) -> Iterator[Event]:
    updated = pushed = 0.0
    for line in lines:
        if "update" in line:
            # `wall_s` and `update_s` come from different clocks. Slices of a lane may not overlap.
            begin = max(updated, timeline.requested_s(line))
            yield from _update(line, begin)
            pushed, updated = max(pushed, begin), line["wall_s"]
            yield _slice("push", f"version {line['update'] - 1}", pushed, line["push_ms"] / 1e3, {})
            pushed += line["push_ms"] / 1e3


def _update(line: UpdateLine, begin: float) -> Iterator[Event]:
    """Yield a slice for the update from the request of its batch on, and slices for its waiting, scoring, training."""
    numbers: Mapping[str, object] = {**line}
    shown = {name: numbers[name] for name in SHOWN if name in numbers}
    at = begin
    yield _slice("learner", f"update {line['update']}", begin, line["wall_s"] - begin, shown)
    for name in INSIDE:
        lasts = min(_number(numbers.get(name, 0.0)), line["wall_s"] - at)
        if lasts > 0:
            yield _slice("learner", name.removesuffix("_s"), at, lasts, {})
            at += lasts


def _slice(lane: str, name: str, begin_s: float, lasts_s: float, shown: Mapping[str, object]) -> Event:
    return _event("X", lane, name, begin_s) | {"dur": round(1e6 * lasts_s), "args": dict(shown)}


def _instants(lines: Sequence[Line]) -> Iterator[Event]:
    for line in lines:
        match timeline.describe_event(line):
            case ("evaluation", text):
                yield _event("i", "evaluation", f"version {text}", line["wall_s"]) | {"s": "t"}
            case (_, text):
                yield _event("i", "driver", text, line["wall_s"]) | {"s": "p"}
            case None:
                pass


def _counters(lines: Sequence[Line]) -> Iterator[Event]:
    for interval in timeline.engine_intervals(lines):
        # A counter keeps its value from its event on, so the interval's rate is placed at its start.
        engine, begin_s = interval.line["engine"], interval.before["wall_s"]
        yield _counter(f"{engine}: tokens a second", begin_s, {"tokens": interval.tokens_per_s})
    processes: dict[str, PhasesLine] = {}
    for line in lines:
        if "update" in line:
            yield _counter("lag of the batch, mean", line["wall_s"], {"versions": _number(line.get("lag_mean", 0.0))})
        elif "queue" in line:
            yield _counter("queue", line["wall_s"], {"ready": line["queue"], "being sampled": line["in_flight"]})
        elif "phases" in line:
            before = processes.get(line["phases"])
            processes[line["phases"]] = line
            if before is not None and phase_times.is_same(before, line):
                yield from _spent(line, before)


def _spent(line: PhasesLine, before: PhasesLine) -> Iterator[Event]:
    """Yield each phase's seconds per second since the process's previous line."""
    lasts = max(line["wall_s"] - before["wall_s"], 1e-9)
    spent = phase_times.between(before["spent"], line["spent"])
    shares = {name: wall_s / lasts for name, (_, wall_s, _) in spent.items() if name != WHOLE}
    if shares:
        yield _counter(f"{line['phases']}: seconds a second", before["wall_s"], shares)


def _counter(name: str, at_s: float, values: Mapping[str, float]) -> Event:
    return {"name": name, "ph": "C", "ts": round(1e6 * at_s), "pid": PROCESS, "args": dict(values)}


def _event(phase: str, lane: str, name: str, at_s: float) -> dict[str, object]:
    return {"name": name, "ph": phase, "ts": round(1e6 * at_s), "pid": PROCESS, "tid": LANES.index(lane)}


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0.0
