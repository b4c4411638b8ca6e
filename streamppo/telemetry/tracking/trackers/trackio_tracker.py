"""trackio: sends to a local database for `trackio show`, or to TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""

import secrets
from collections.abc import Sequence

import trackio  # pyright: ignore[reportMissingImports]

from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.trackers.run import TrackedRun


class Trackio:
    """A run of trackio. Its id is the run's name and a random suffix: another folder may have a run of this name."""

    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or f"{run.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=run.project,
            name=self.id,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.version)

    def close(self, outcome: str) -> None:
        """Wait until the library has written everything. trackio stores no outcome."""
        self._run.finish()
