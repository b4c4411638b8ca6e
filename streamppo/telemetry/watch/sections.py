"""Renders the sections of the live page as HTML, repeatedly during a run. Text from a run is escaped."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from jinja2 import Environment
from markupsafe import Markup

from streamppo.telemetry.live.state import RunState
from streamppo.telemetry.metrics_file import RestartLine
from streamppo.telemetry.report import page, plot, view
from streamppo.telemetry.report.view import NamedNumber, View
from streamppo.telemetry.watch import pipeline

FOLDER = Path(__file__).parent
FIRST = (
    "Reward",
    "Held-out accuracy",
    "Parts of the reward",
    "Entropy",
    "KL",
    "Effective sample size",
    "Clip fraction",
    "Length",
)
"""The charts that the page always shows. After a click the page shows all charts."""
RESTARTS = 50


class RunView(NamedTuple):
    """A run for the page: its data, its state, and its `condition` in a word, such as running or killed."""

    view: View
    state: RunState
    condition: str


class _Macros(Protocol):
    """The macros of sections.html."""

    def head(self, run: RunView, left: str) -> Markup: ...
    def headline(self, run: RunView, rows: Sequence[NamedNumber], beside: view.RunsTable | None) -> Markup: ...
    def curves(self, charts: Sequence[page.Chart]) -> Markup: ...
    def pipeline(self, run: RunView) -> Markup: ...
    def data(self, run: View) -> Markup: ...
    def trouble(self, run: View, restarts: Sequence[RestartLine]) -> Markup: ...


def environment() -> Environment:
    """Return the jinja environment with the templates of the page, and the report's templates that it uses."""
    jinja = page.environment(FOLDER)
    jinja.globals |= {
        "actors": pipeline.actors,
        "stages": pipeline.stages,
        "waits": pipeline.waits,
        "pipeline_charts": pipeline.charts,
        "newest_updates": pipeline.newest_updates,
    }
    return jinja


MACROS = cast(_Macros, environment().get_template("sections.html").module)


def sections(runs: Sequence[RunView]) -> dict[str, str]:
    """Return the HTML of each section by name. Curves and headlines show all runs, other sections the first run."""
    first, views = runs[0], [run.view for run in runs]
    charts = cache(lambda: page.charts(views))
    parts: dict[str, Callable[[], Markup]] = {
        "head": lambda: MACROS.head(first, _time_left(first)),
        "headline": lambda: MACROS.headline(first, _headline(first), view.compare_headlines(views)),
        "curves": lambda: MACROS.curves([chart for chart in charts() if _is_first(chart)]),
        "more": lambda: MACROS.curves([chart for chart in charts() if not _is_first(chart)]),
        "pipeline": lambda: MACROS.pipeline(first),
        "data": lambda: MACROS.data(first.view),
        "trouble": lambda: MACROS.trouble(first.view, _restarts(first.view)),
    }
    return {name: view.section(part) for name, part in parts.items()}


def _restarts(run: View) -> list[RestartLine]:
    """The newest restarts, newest first."""
    return [line for line in run.lines if "restart" in line][-RESTARTS:][::-1]


def _is_first(chart: page.Chart) -> bool:
    return chart.title in FIRST and not chart.is_flat


def _headline(run: RunView) -> list[NamedNumber]:
    rows = [row for row in view.headline(run.view) if row.name != "outcome"]
    if run.condition != "running":
        return rows
    state = run.state
    speeds = {"sampled": state.sampled_per_s, "trained": state.trained_per_s}
    return rows + [
        NamedNumber(f"{name} at present", f"{plot.abbreviate(round(speed))}/s", "tokens")
        for name, speed in speeds.items()
        if speed
    ]


def _time_left(run: RunView) -> str:
    """Return the time left at the present speed; "" if it is unknown or the run has ended."""
    seconds = run.state.seconds_left
    return f"about {view.duration(seconds)} left" if seconds and run.condition == "running" else ""
