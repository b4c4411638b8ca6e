"""Weights & Biases: its server, or with WANDB_MODE=offline files in runs/NAME/wandb, which `wandb sync` sends.

WANDB_API_KEY, WANDB_BASE_URL, WANDB_ENTITY and the library's other environment variables hold.
"""

import secrets
from collections.abc import Sequence

import wandb  # pyright: ignore[reportMissingImports]

from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.trackers.run import TrackedRun, is_successful

STEP = "update"
"""The metric that curves are drawn over: several lines have one version, and versions of evaluations come late."""


class WeightsAndBiases:
    """A run under an id of ours. The library sends from a process of its own, and keeps what a server refuses."""

    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or secrets.token_hex(4)
        # Console and machine would be those of the tracker's own process.
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
        """Hand the points to the library's process."""
        for point in points:
            self._run.log({STEP: point.version, **point.values})

    def close(self, outcome: str) -> None:
        """Wait until the library has sent everything."""
        self._run.finish(exit_code=0 if is_successful(outcome) else 1)
