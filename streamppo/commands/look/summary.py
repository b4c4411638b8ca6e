"""Show a run on one screen, or all runs of a folder as a table. Needs neither Ray nor torch, also beside a run."""

import json
from datetime import datetime
from pathlib import Path

from streamppo.commands.console import console, echo, table
from streamppo.config import file as configfile
from streamppo.driver import report
from streamppo.driver.folder import lock
from streamppo.errors import RunError
from streamppo.telemetry import diagnosis, metrics_file, progress
from streamppo.telemetry import summary as summaries
from streamppo.telemetry.live.drawing import truncate
from streamppo.telemetry.record import read_summary
from streamppo.telemetry.report import view
from streamppo.telemetry.report.view import View, attempt, condition_word
from streamppo.terminal import harmless

HEADINGS = ("run", "state", "updates", "reward", "accuracy", "last")
GAP, LEAST_STATE = 2, 10
"""Cells between two columns, and cells of a state at least."""


def summary(run: Path, *, as_json: bool) -> int:
    """Print a verdict, the numbers that people ask for first and the findings, or all numbers as JSON.

    Of a run that is worse than at its start the findings that are over are printed too, for they tell how it fell.
    """
    shown = _view(run)
    if as_json:
        echo(*json.dumps(current_summary(run), indent=2).split("\n"))
        return 0
    rows = table("", "", "")
    for row in view.headline(shown):
        rows.add_row(row.name, condition(run, shown) if row.name == "outcome" else row.value, row.remark)
    config = configfile.load(run / configfile.CONFIG)
    if origin := config.origin:
        rows.add_row("forked of", Path(origin.run).name, f"at version {origin.version} ({origin.digest[:12]})")
    console().print(rows)
    worse = progress.is_worse(view.evaluations(shown))
    for finding in diagnosis.diagnose_lines(config, shown.lines, shown.summary):
        if finding.holds or worse:
            kind = "warning" if finding.holds else "over"
            told = f"{kind}: {finding.name} (update {finding.last}): {finding.numbers}"
            echo("", told, f"  try: {finding.advice}")
    return 0


def current_summary(run: Path) -> dict[str, object]:
    """The content of summary.json; without that file its numbers that metrics.jsonl gives, and the run's state."""
    shown = _view(run)
    known = {**(shown.summary or {"outcome": condition(run, shown), **summaries.summarise(shown.lines)})}
    if "attempts" not in known and (found := report.attempts(run, configfile.load(run / configfile.CONFIG))):
        known["attempts"] = found
    return known


def list_runs(runs: Path) -> int:
    """Print a row for each run, the one in which something happened last at the end. Raises `RunError` without one."""
    found = [path.parent for path in runs.glob(f"*/{configfile.CONFIG}")]
    if not found:
        raise RunError(f"{runs}: no run is there")
    cells = [_row(folder) for folder in sorted(found, key=_last_change_s)]
    others = sum(
        max(len(row[place]) for row in (HEADINGS, *cells)) + GAP for place in range(len(HEADINGS)) if place != 1
    )
    shown, rows = console(), table(*HEADINGS)
    for column in rows.columns:
        column.no_wrap = True
    # An error may be long: it takes what the others leave of the line.
    for name, state, *numbers in cells:
        rows.add_row(name, truncate(harmless(state), max(LEAST_STATE, shown.width - others - GAP)), *numbers)
    shown.print(rows)
    return 0


def _row(folder: Path) -> list[str]:
    """The name of a run, its state, its numbers; a run that cannot be read has the reason for its state."""
    shown, why = attempt(lambda: _view(folder))
    shown = shown or View(folder.name, [])
    told = summaries.summarise(shown.lines)
    numbers = [_short(told[name]["final"]) for name in ("reward", "eval_accuracy")]
    when = datetime.fromtimestamp(_last_change_s(folder)).strftime("%Y-%m-%d %H:%M")
    return [folder.name, why or condition_word(condition(folder, shown)), f"{told['updates']}", *numbers, when]


def _view(run: Path) -> View:
    return View(run.name, metrics_file.read(run), read_summary(run))


def condition(run: Path, shown: View) -> str:
    """Running, or how the run ended; killed, if nothing says how."""
    if lock.is_running(run):
        return "running"
    return shown.outcome if any("end" in line for line in shown.lines[-1:]) else "killed"


def _last_change_s(run: Path) -> float:
    """When something was last written down about the run, in seconds of the clock."""
    path = run / metrics_file.METRICS
    return (path if path.exists() else run / configfile.CONFIG).stat().st_mtime


def _short(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"
