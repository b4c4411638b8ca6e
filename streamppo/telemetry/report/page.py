"""Renders report.html: one file that opens offline. Text from a run is escaped, and the page loads no other file."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from streamppo.telemetry import catalogue, progress, summary
from streamppo.telemetry.metrics_file import RemadeLine, UpdateLine, version_of
from streamppo.telemetry.report import plot, view
from streamppo.telemetry.report.plot import Bar, Curve, Point
from streamppo.telemetry.report.view import RunsTable, View

VersionLine: TypeAlias = tuple[int, UpdateLine | RemadeLine]
"""A version, and the line of the update that made it."""
NUMBER = (int, float)
COLOURS = 6
"""Number of curve colours in the page's style. If there are more runs, colours repeat."""


class Panel(NamedTuple):
    """The plan of a chart: curves of `metrics` with a common `unit`. `says` tells the user how to read the chart."""

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    says: str = ""


PANELS = (
    Panel("Reward", ("reward",), says="If it rises, the policy learns this part of the reward."),
    Panel(
        "Held-out accuracy",
        ("accuracy",),
        "share",
        "If it rises, the policy learns the task. A single dip may be noise; two in a row are a fall.",
    ),
    Panel(
        "Entropy",
        ("entropy",),
        "nats per token",
        "It falls as the policy becomes certain. Near zero, the policy no longer explores.",
    ),
    Panel(
        "KL",
        ("behavior_kl", "proximal_kl", "reference_kl", "teacher_kl"),
        "nats",
        "Distance between policies. A small and level KL is good. A jump means that an update went too far.",
    ),
    Panel(
        "Effective sample size",
        ("ess", "ess_sequence"),
        "share",
        "Near 1, old tokens are as useful as new ones. Below 0.3, few tokens count: lower queue.max_lag.",
    ),
    Panel(
        "Ratio",
        ("ratio_p01", "ratio_p50", "ratio_p99"),
        "current / proximal",
        "At 1 the update has not changed the policy. A wider band means larger steps.",
    ),
    Panel(
        "Clip fraction",
        ("clip_fraction_high", "clip_fraction_low"),
        "share of tokens",
        "Above 0.3 the steps are too large. With one step an update it is always 0.",
    ),
    Panel(
        "Gradient norm",
        ("grad_norm", "critic_grad_norm"),
        says="A level norm is good. A point far above the others is a spike: see if the reward falls after it.",
    ),
    Panel(
        "Lag",
        ("lag_mean", "lag_max"),
        "versions",
        "Age of the tokens that are trained on. At 0 training is synchronous PPO.",
    ),
    Panel(
        "Learner waits",
        ("wait_share",),
        "share of time",
        "Near 1, engines or rewards are too slow. Near 0, the learner is the slowest part.",
    ),
    Panel("Tokens a second", ("learner_tokens_per_s",), "tokens/s"),
    Panel("Seconds of an update", ("update_s", "train_s", "score_s", "wait_s"), "s"),
    Panel("Length", ("length",), "tokens"),
    Panel(
        "Shares of the batch",
        ("truncated", "equal_groups"),
        "share",
        "truncated: answers that were cut off. equal_groups: near 1, no sample of a group is better than another.",
    ),
    Panel("Value loss", ("value_loss",)),
    Panel(
        "Explained variance",
        ("explained_variance",),
        "share",
        "At 1 the critic predicts the rewards. At 0 it is no better than a constant, and below 0 it is worse.",
    ),
    Panel("Policy loss", ("policy_loss",), says="Its height does not measure the policy's quality."),
    Panel(
        "Engine and learner at lag 0",
        ("mismatch",),
        "nats per token",
        "Near 0, both compute the same policy. Above 0.05, the engine samples from another policy.",
    ),
    Panel("Learning rate", ("lr",)),
    Panel("Push", ("push_ms",), "ms"),
    Panel("Memory of rank 0", ("peak_memory_mib",), "MiB"),
)
"""The charts in the order of the page. A chart is left out if no run has any of its metrics."""
COMPUTED = {
    "accuracy": "share of held-out prompts with a correct greedy answer, by the version evaluated",
    "wait_share": "wait_s / update_s: share of the learner's time spent waiting for a batch",
}
"""Descriptions of the curves that this file computes from other metrics."""


class Chart(NamedTuple):
    """A drawn panel. `help` has (metric, description). `is_flat` is true if every curve is constant."""

    title: str
    drawing: Markup
    help: Sequence[tuple[str, str]]
    legend: Sequence[Curve]
    is_flat: bool = False
    says: str = ""


def render(
    views: Sequence[View],
    differences: Sequence[tuple[str, RunsTable]] = (),
    predicted: Sequence[tuple[str, RunsTable]] = (),
) -> str:
    """Return the HTML page of one or more runs. `differences` and `predicted` are pairs: a sentence and its table."""
    runs = [run_view for run_view in views if not run_view.is_replay]
    template = environment().get_template("page.html")
    return template.render(views=views, runs=runs, differences=differences, predicted=predicted)


def environment(*folders: Path) -> Environment:
    """Return the jinja environment with the page's templates, and those in `folders`."""
    jinja = Environment(loader=FileSystemLoader([*folders, Path(__file__).parent]), autoescape=True)
    jinja.globals |= {
        "headline": view.headline,
        "beside": view.compare_headlines,
        "ledger": view.ledger,
        "lengths": view.lengths,
        "attempts": view.attempts,
        "reuse": view.reuse,
        "agents": view.agents,
        "timeline": lambda run_view: plot.timeline(view.events(run_view)),
        "lags": lags,
        "charts": charts,
        "section": view.section,
        "condition_class": view.condition_class,
        "condition_word": view.condition_word,
        "signs": view.signs,
    }
    return jinja


def curves(run_view: View) -> str:
    """Return the HTML of a run's curves for a notebook, in the order of the panels."""
    drawn = [f"<figure><h3>{chart.title}</h3>{chart.drawing}</figure>" for chart in charts([run_view])]
    style = (Path(__file__).parent / "page.css").read_text("utf-8")
    body = "".join(drawn) or '<p class="none">No update has been made.</p>'
    return f'<style>{style} body {{ padding: 0; }}</style><div class="grid">{body}</div>'


def charts(views: Sequence[View]) -> list[Chart]:
    """Draw each panel for which `views` have data, and a panel of the reward's components; flat charts come last."""
    lines = [[(version_of(line), line) for line in summary.updates_in_order(run_view.lines)] for run_view in views]
    names = set[str]().union(*(line for run in lines for _, line in run))
    components = sorted(name for name in names if name.startswith("reward_"))
    panels = [*PANELS, *([Panel("Parts of the reward", tuple(components))] if components else [])]
    panel_charts = [_chart(panel, views, lines) for panel in panels]
    return sorted((chart for chart in panel_charts if chart.drawing), key=lambda chart: chart.is_flat)


def _chart(panel: Panel, views: Sequence[View], lines: Sequence[Sequence[VersionLine]]) -> Chart:
    curves: list[Curve] = []
    drawn: set[str] = set()
    for number, (run_view, run) in enumerate(zip(views, lines, strict=True)):
        for place, metric in enumerate(panel.metrics):
            points = _points(metric, run_view, run)
            name = " ".join([run_view.name] * (len(views) > 1) + [metric] * (len(panel.metrics) > 1)) or metric
            colour = (number if len(views) > 1 else place) % COLOURS
            if points:
                drawn.add(metric)
                curves.append(Curve(name, points, colour, dashed=len(views) > 1 and place > 0))
    sentences = [(metric, _sentence(metric)) for metric in panel.metrics if metric in drawn]
    is_flat = all(curve.is_flat for curve in curves)
    drawing, legend = plot.curves(curves, "update", panel.unit), curves if len(curves) > 1 else []
    return Chart(panel.title, drawing, sentences, legend, is_flat=is_flat, says=panel.says)


def _points(metric: str, run_view: View, run: Sequence[VersionLine]) -> list[Point]:
    if metric == "accuracy":
        scored = progress.evaluations_with_score(view.evaluations(run_view))
        return [(float(evaluation.version), evaluation.accuracy) for evaluation in scored]
    if metric == "wait_share":
        lines = [(version, line) for version, line in run if "wait_s" in line and line["update_s"] > 0]
        return [(version, line["wait_s"] / line["update_s"]) for version, line in lines]
    # Only the required metrics of a line are known to be numbers.
    return [(version, value) for version, line in run if isinstance(value := line.get(metric), NUMBER)]


def _sentence(metric: str) -> str:
    entry = catalogue.find(metric)
    return COMPUTED.get(metric) or (entry.text if entry else "")


def lags(run_view: View) -> Markup:
    """Draw tokens by lag, with masked tokens in another colour."""
    totals = summary.line_totals(run_view.lines)
    sampled, trained = totals["lag"]["histogram"], totals["trained_lag"]["histogram"]
    every = sampled if max(sampled, default=0) > plot.MOST_COLUMNS else range(max(sampled, default=-1) + 1)
    bars = [Bar(f"{lag}", sampled.get(lag, 0), 0 if trained.get(lag) else 3) for lag in every]
    return plot.bars(bars, "tokens by lag in versions")
