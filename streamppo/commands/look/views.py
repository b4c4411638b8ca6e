"""Shows a run as a page that opens offline, as a trace for Perfetto, or as the times of its phases."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamppo import durable
from streamppo.commands.console import echo, to_json
from streamppo.driver import report as reports
from streamppo.errors import ConfigError, RunError
from streamppo.process import WHOLE
from streamppo.telemetry import metrics_file, phase_times
from streamppo.telemetry import trace as traces
from streamppo.telemetry.catalogue import PHASES
from streamppo.telemetry.report.view import RunsTable, make_part


def report(paths: Sequence[Path], to: Path | None, measured: Sequence[Path] = (), *, as_json: bool = False) -> int:
    """Write a report to `to`; by default to the run's folder if `paths` is one run, else to the current folder.

    The page compares each run with a prediction from the costs of `measured` runs. The differences between runs with a
    common past are printed; with `as_json` only they are printed, and no page is written.
    """
    if as_json and (measured or to):
        option, use = ("--measured", "adds to") if measured else ("--to", "names")
        raise ConfigError(f"{option} {use} the HTML page, and --json writes none: use one of them")
    if as_json:
        found = reports.differences(paths)
        echo(json.dumps([{**one._asdict(), "rows": msgspec.to_builtins(one.rows)} for one in found]))
        return 0
    if to is not None:
        durable.refuse_output(to, RunError)
    single = len(paths) == 1 and paths[0].is_dir()
    differences, error = make_part(lambda: reports.differences(paths))
    file = to or (paths[0] / reports.REPORT if single else Path(reports.REPORT))
    try:
        path = reports.write(paths, file, differences or (), _predicted(paths, measured))
    except RunError as failed:
        if to is None and not os.access(file.parent, os.W_OK):
            raise RunError(f"{failed}; --to FILE writes it elsewhere") from failed
        raise
    echo(f"report: {path}", *(difference.sentence() for difference in differences or ()), result=file)
    if error:
        echo(f"no difference: {error}", result=file)
    return 0


def _predicted(paths: Sequence[Path], measured: Sequence[Path]) -> list[tuple[str, RunsTable]]:
    if not measured:
        return []
    from streamppo.commands.plan import plan

    costs = f"costs of {', '.join(path.name for path in measured)}"
    runs = [path for path in paths if path.is_dir()]
    compared = zip(runs, plan.compare(runs, measured), strict=True)
    return [(f"{run.name}, by the {costs}", RunsTable(plan.COLUMNS, comparison.rows())) for run, comparison in compared]


def trace(run: Path, to: Path) -> int:
    """Write the events of `run` to the file `to`. Raises `RunError` without events or if `to` cannot be written."""
    durable.refuse_output(to, RunError)
    if not (lines := metrics_file.read(run)):
        raise RunError(f"{run}: {metrics_file.METRICS} has no line yet")
    timeline = {"traceEvents": traces.events(lines, run.name), "displayTimeUnit": "ms"}
    durable.write_output(to, to_json(timeline), RunError)
    echo(f"{to}: open it at https://ui.perfetto.dev, or in chrome://tracing; the browser does not upload it", result=to)
    return 0


def time_table(run: Path) -> int:
    """Print the milliseconds of an update by process and phase. Raises `RunError` if no phases were reported."""
    processes = phase_times.per_update(metrics_file.read(run))
    if not processes:
        raise RunError(f"{run}: no process has reported its phases yet; the first report comes after about ten seconds")
    for process, phases in sorted(processes.items()):
        total_ms = phases[WHOLE].cpu_ms
        echo(f"{process}: {total_ms:.1f} ms of CPU for one update")
        echo(f"  {'phase':10} {'calls':>7} {'wall ms':>9} {'CPU ms':>9} {'share':>6}")
        for name, phase in sorted(phases.items(), key=lambda row: -row[1].cpu_ms):
            if name != WHOLE:
                meaning = PHASES[name].partition(": ")[2] if name in PHASES else "overhead, other threads, and Ray"
                share = phase.cpu_ms / max(total_ms, 1e-9)
                numbers = f"{phase.calls:7.1f} {phase.wall_ms:9.2f} {phase.cpu_ms:9.2f} {share:6.0%}"
                echo(f"  {name:10} {numbers}  {meaning}")
    return 0
