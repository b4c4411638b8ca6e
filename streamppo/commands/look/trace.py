"""Write what a run did when, for Perfetto."""

import json
from pathlib import Path

from streamppo import durable
from streamppo.commands.console import echo
from streamppo.errors import RunError
from streamppo.telemetry import metrics_file
from streamppo.telemetry import trace as traces


def trace(run: Path, to: Path) -> int:
    """Write the events of `run` to the file `to`. Raises `RunError` if nothing is there, or no file can be written."""
    if not (lines := metrics_file.read(run)):
        raise RunError(f"{run}: nothing has happened yet: {metrics_file.METRICS} has no line")
    found = {"traceEvents": traces.events(lines, run.name), "displayTimeUnit": "ms"}
    with durable.naming(to, RunError):
        to.write_text(json.dumps(found))
    echo(f"{to}: open it at https://ui.perfetto.dev, or in chrome://tracing; nothing of it leaves the browser")
    return 0
