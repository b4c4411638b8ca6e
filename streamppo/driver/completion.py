"""Recognises a complete run: `resume` says so and changes nothing. Needs neither Ray nor torch."""

import shlex
from pathlib import Path

from streamppo.config.sections import Config
from streamppo.learner.checkpoint import manifest
from streamppo.telemetry import metrics_file
from streamppo.telemetry.metrics_file import FINISHED

MODEL = Path("final/config.json")


def sentence(config: Config, run: Path) -> str:
    """Return the message for a run in the folder `run` that has nothing left to do for `config`; "" if it has.

    A run is complete if its last driver finished, every update has its line, and the final model and the checkpoint of
    the newest version exist.
    """
    lines = metrics_file.read(run)
    recorded = metrics_file.recorded_versions(lines)
    newest = max(recorded, default=0)
    last = lines[-1] if lines else None
    if last is None or "end" not in last or last["end"] != FINISHED:
        return ""
    if newest < config.updates or len(recorded) < newest:
        return ""
    checkpoints = [int(path.name) for path in manifest.complete(run / "checkpoints")]
    if not (run / MODEL).is_file() or newest not in checkpoints:
        return ""
    quoted = shlex.quote(str(run))
    return (
        f"{run}: nothing to do, and nothing is changed: all {newest} updates are made, and updates = {config.updates}; "
        f"more of them: streamppo resume {quoted} updates={max(newest, config.updates) + 50}; "
        f"another evaluation: streamppo eval {quoted}"
    )
