"""TensorBoard: event files in runs/NAME/tensorboard, which `tensorboard --logdir runs` shows."""

from collections.abc import Sequence
from pathlib import Path

from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]

from streamppo.telemetry import catalogue
from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.trackers.run import Run


class TensorBoard:
    """One event file for each part of the run: TensorBoard shows those of a folder as one run."""

    def __init__(self, run: Run) -> None:
        self.id = "tensorboard"
        self._writer = Writer(str(Path(run.folder) / self.id))

    def send(self, points: Sequence[Point]) -> None:
        """Write scalars, with the catalogue's sentences."""
        for point in points:
            for name, value in point.values.items():
                entry = catalogue.find(name)
                text = entry.text if entry else None
                self._writer.add_scalar(name, value, point.version, wall_time=point.at_s, description=text)
        self._writer.flush()

    def close(self, outcome: str) -> None:
        """Close the file; it has no place for an outcome."""
        self._writer.close()
