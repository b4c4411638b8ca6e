"""The pipeline of a run on the live page: its stages, its actors, charts over time, and the newest updates."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from streamppo.telemetry import timeline
from streamppo.telemetry.live.pipeline import verdict
from streamppo.telemetry.live.state import RunState
from streamppo.telemetry.metrics_file import Line
from streamppo.telemetry.report import plot, view
from streamppo.telemetry.report.page import Chart
from streamppo.telemetry.report.plot import Curve, Histogram, Point
from streamppo.telemetry.report.view import View, or_dash

NEWEST = 20


class StageView(NamedTuple):
    """A stage of the pipeline: its most important number as text, and remarks."""

    name: str
    value: str
    remarks: Sequence[str]


class Actor(NamedTuple):
    """A rollout actor: its newest version, and its tokens per second and idle share between its two newest lines."""

    name: str
    version: str
    tokens_per_s: str
    idle: str


def stages(state: RunState) -> list[StageView]:
    """Return the four stages in the order of the data: rollout, queue, learner, weights."""
    versions = sorted({engine.line["version"] for engine in state.engines.values()})
    count, idle = len(state.engines), or_dash(state.engines_idle, "{:.0%}")
    lag = or_dash(state.newest.get("lag_mean"), "{:.2f}")
    spread = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions))
    batch = f"a batch is {state.batch_size:,}" if state.batch_size else ""
    push = f"pushed in {state.newest['push_ms']:.0f} ms" if "push_ms" in state.newest else ""
    update, waits = or_dash(state.update_s, "{:.2g} s"), or_dash(state.learner_waits, "{:.0%}")
    actors = f"{count} actor{'s' * (count != 1)} with version {spread or '-'}"
    return [
        StageView("rollout", f"{_abbreviate(state.sampled_per_s)} tokens/s", [actors, f"idle {idle}"]),
        StageView("queue", f"{state.ready:,} ready", [batch, f"{state.in_flight:,} being sampled"]),
        StageView("learner", f"{_abbreviate(state.trained_per_s)} tokens/s", [f"{update} an update", f"waits {waits}"]),
        StageView("weights", f"version {state.version:,}", [push, f"lag {lag} versions"]),
    ]


def waits(state: RunState) -> str:
    """Say whether the learner or the engines wait; "" before the first update."""
    learner = state.learner_waits
    return "" if learner is None else verdict(learner, state.engines_idle or 0.0)


def actors(lines: Sequence[Line]) -> list[Actor]:
    """Return the rollout actors that have a line in the newest part of the run."""
    begins = [place for place, line in enumerate(lines) if "part" in line]
    part = lines[begins[-1] :] if begins else lines
    newest = {interval.line["engine"]: interval for interval in timeline.engine_intervals(part)}
    return [
        Actor(name, f"{last.line['version']:,}", _abbreviate(last.tokens_per_s), f"{last.idle:.0%}")
        for name, last in sorted(newest.items())
    ]


def charts(lines: Sequence[Line]) -> list[Chart]:
    """Return the charts that have data."""
    all_charts = [_waiting(lines), _queue(lines), _lag(lines), _reuse(lines)]
    return [chart for chart in all_charts if chart.drawing]


def newest_updates(run_view: View) -> Markup:
    """Draw the timeline of the newest updates."""
    updates = [line for line in run_view.lines if "update" in line][-NEWEST:]
    if not updates:
        return Markup("")
    begin_s = timeline.requested_s(updates[0])
    # An actor's interval begins at its previous line, which may be older than `begin_s`.
    part = [line for line in run_view.lines if line["wall_s"] >= begin_s or "engine" in line or "part" in line]
    return plot.timeline(view.events(View(run_view.name, part)), begin_s)


def _waiting(lines: Sequence[Line]) -> Chart:
    learner = [
        (line["wall_s"], line["wait_s"] / line["update_s"])
        for line in lines
        if "update" in line and line["update_s"] > 0
    ]
    engines = [(interval.line["wall_s"], interval.idle) for interval in timeline.engine_intervals(lines)]
    text = "share of time: the learner without a batch, a rollout actor with nothing to decode"
    curves = [Curve("learner waits", learner, 0), Curve("engines idle", engines, 1)]
    return _chart("Who waits", curves, "share of time", text)


def _queue(lines: Sequence[Line]) -> Chart:
    ready: list[Point] = [(line["wall_s"], line["queue"]) for line in lines if "queue" in line]
    sampled: list[Point] = [(line["wall_s"], line["in_flight"]) for line in lines if "queue" in line]
    curves = [Curve("ready", ready, 2), Curve("being sampled", sampled, 4)]
    return _chart("Queue", curves, "trajectories", "trajectories that are ready and being sampled")


def _lag(lines: Sequence[Line]) -> Chart:
    columns = [
        Histogram(line["update"], {int(lag): count for lag, count in line["lag_histogram"].items()})
        for line in lines
        if "update" in line
    ]
    text = "tokens of each batch by their lag in versions; a deeper colour is a larger share of the batch"
    return Chart("Lag over time", plot.heat_map(columns, "update", "lag in versions"), [("lag_histogram", text)], [])


def _reuse(lines: Sequence[Line]) -> Chart:
    engines = [line for line in lines if "engine" in line]
    prompts: list[Point] = [(line["wall_s"], line["prefix_reused"]) for line in engines if "prefix_reused" in line]
    turns: list[Point] = [(line["wall_s"], line["context_reused"]) for line in engines if "context_reused" in line]
    text = "share of tokens that came from a cache: of all prompts, and of earlier turns"
    return _chart("Computed once", [Curve("prompts", prompts, 5), Curve("contexts of turns", turns, 2)], "share", text)


def _chart(title: str, curves: Sequence[Curve], unit: str, text: str) -> Chart:
    drawn = [curve for curve in curves if curve.points]
    return Chart(title, plot.curves(drawn, "seconds", unit), [("over the seconds of the run", text)], drawn)


def _abbreviate(number: float | None) -> str:
    return "-" if number is None else plot.abbreviate(round(number))
