"""Weights & Biases: its server, or with WANDB_MODE=offline files in runs/NAME/wandb for `wandb sync`.

WANDB_API_KEY, WANDB_BASE_URL, WANDB_ENTITY and the library's other environment variables apply.
"""

import secrets
from collections.abc import Sequence

import wandb  # pyright: ignore[reportMissingImports]

from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.trackers.run import TrackedRun, is_successful

STEP = "update"
"""The x axis of curves, because wandb's own step must grow: lines share versions, and evaluations come late."""


class WeightsAndBiases:
    """A run under our own id. The library sends from another process, and keeps data that the server refuses."""

    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or secrets.token_hex(4)
        # Console output and machine statistics would be the tracker process's.
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self._run = wandb.init(
            project=run.project,
            id=self.id,
            name=run.name,
            dir=run.folder,
            config=dict(run.config),
            allow_val_change=True,
            resume="allow",
            settings=settings,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def send(self, points: Sequence[Point]) -> None:
        """Pass the points to the library's process."""
        for point in points:
            self._run.log({STEP: point.version, **point.values})

    def close(self, outcome: str) -> None:
        """Wait until the library has sent everything."""
        self._run.finish(exit_code=0 if is_successful(outcome) else 1)
