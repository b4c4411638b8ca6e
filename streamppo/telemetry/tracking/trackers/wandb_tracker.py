"""Weights & Biases: sends to its server, or with WANDB_MODE=offline to files in runs/NAME/wandb for `wandb sync`."""

import secrets
from collections.abc import Sequence

import wandb  # pyright: ignore[reportMissingImports]

from streamppo.telemetry.metrics_file import FINISHED
from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.trackers.run import TrackedRun

STEP = "update"
"""The x axis of curves: the version. wandb's own step must grow, but lines may have equal or decreasing versions."""


class WeightsAndBiases:
    """A run of wandb with a random id. The library's process sends the data, and stores data that a server refuses."""

    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or secrets.token_hex(4)
        # wandb would record the console output and the machine statistics of the tracker's process, not of the run.
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
        for point in points:
            self._run.log({STEP: point.version, **point.values})

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == FINISHED else 1)
