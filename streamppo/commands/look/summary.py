"""Prints a run on one screen, or all runs of a folder as a table. Runs may be in progress."""

import json
from datetime import datetime
from pathlib import Path

from streamppo.commands.console import console, echo, table
from streamppo.config import file as configfile
from streamppo.driver import report, run_folder
from streamppo.errors import RunError
from streamppo.telemetry import diagnosis, metrics_file, progress
from streamppo.telemetry import summary as summaries
from streamppo.telemetry.live.drawing import truncate
from streamppo.telemetry.record import read_summary
from streamppo.telemetry.report import view
from streamppo.telemetry.report.view import View, condition_word, make_part, or_dash
from streamppo.terminal import harmless

HEADINGS = ("run", "state", "updates", "reward", "accuracy", "last")
STATE, GAP, LEAST_STATE = 1, 2, 10
"""The number of the state's column, the characters between two columns, and the minimum characters of a state."""


def summary(run: Path, *, as_json: bool) -> int:
    """Print outcome, main numbers and warnings of a run (of a run that got worse, past warnings too), or JSON."""
    if as_json:
        echo(*json.dumps(current_summary(run), indent=2).split("\n"))
        return 0
    shown, condition = _read(run)
    rows = table("", "", "")
    for row in view.headline(shown):
        rows.add_row(row.name, condition if row.name == "outcome" else row.value, row.remark)
    config = configfile.load(run / configfile.CONFIG)
    if origin := config.origin:
        rows.add_row("forked of", Path(origin.run).name, f"at version {origin.version} ({origin.digest[:12]})")
    console().print(rows)
    worse = progress.is_worse(view.evaluations(shown))
    for finding in diagnosis.diagnose_lines(config, shown.lines, shown.summary):
        if finding.holds or worse:
            kind = "warning" if finding.holds else "over"
            headline = f"{kind}: {finding.name} (update {finding.last}): {finding.numbers}"
            echo("", headline, f"  try: {finding.advice}")
    return 0


def current_summary(run: Path) -> dict[str, object]:
    """Return the content of summary.json. Without this file, return the totals of metrics.jsonl and the run's state."""
    shown, condition = _read(run)
    numbers = {**(shown.summary or {"outcome": condition, **summaries.line_totals(shown.lines)})}
    if "attempts" not in numbers and (attempts := report.count_attempts(run, configfile.load(run / configfile.CONFIG))):
        numbers["attempts"] = attempts
    return numbers


def list_runs(runs: Path) -> int:
    """Print a row for each run, the latest last, in columns that fit the terminal. Raises `RunError` without runs."""
    folders = [path.parent for path in runs.glob(f"*/{configfile.CONFIG}")]
    if not folders:
        raise RunError(f"{runs}: no run found; `--runs` names another folder")
    cells = [_row(folder) for folder in sorted(folders, key=_last_change_s)]
    widths = [max(len(row[place]) for row in (HEADINGS, *cells)) + GAP for place in range(len(HEADINGS))]
    shown, places = console(), [*range(len(HEADINGS))]
    # The state may be a long error. Its column gets the width that other columns leave.
    while (state_width := shown.width - sum(widths[place] for place in places if place != STATE)) < LEAST_STATE + GAP:
        if len(places) == STATE + 1:
            break
        places.pop()
    rows = table(*(HEADINGS[place] for place in places))
    rows.columns[0].overflow = "fold"
    for column in rows.columns[STATE:]:
        column.no_wrap = True
    for row in cells:
        row[STATE] = truncate(harmless(row[STATE]), max(LEAST_STATE, state_width - GAP))
        rows.add_row(*(row[place] for place in places))
    shown.print(rows)
    return 0


def _row(folder: Path) -> list[str]:
    read, error = make_part(lambda: _read(folder))
    shown, condition = read or (View(folder.name, []), error)
    totals = summaries.line_totals(shown.lines)
    numbers = [or_dash(totals[name]["final"], "{:.3f}") for name in ("reward", "eval_accuracy")]
    when = datetime.fromtimestamp(_last_change_s(folder)).strftime("%Y-%m-%d %H:%M")
    return [folder.name, condition if error else condition_word(condition), f"{totals['updates']}", *numbers, when]


def _read(run: Path) -> tuple[View, str]:
    """Return the view of a run and its condition."""
    # If the lines were read first, a run that ends meanwhile would have neither a driver nor an outcome.
    is_running = run_folder.is_running(run)
    shown = View(run.name, metrics_file.read(run), read_summary(run))
    return shown, condition_of(shown, is_running=is_running)


def condition_of(shown: View, *, is_running: bool) -> str:
    """Return "running", the outcome of the run, or "killed" if it has none. `is_running` is older than the lines."""
    if is_running:
        return "running"
    return shown.outcome if any("end" in line for line in shown.lines[-1:]) else "killed"


def _last_change_s(run: Path) -> float:
    path = run / metrics_file.METRICS
    return (path if path.exists() else run / configfile.CONFIG).stat().st_mtime
