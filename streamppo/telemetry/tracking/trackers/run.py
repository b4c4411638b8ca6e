"""A run as trackers know it, and a tracker as its process uses it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import msgspec

from streamppo.config.telemetry import Tracker as Library
from streamppo.telemetry.metrics_file import FINISHED
from streamppo.telemetry.tracking.points import Point

Kind: TypeAlias = Library | Literal["prometheus"]


class TrackedRun(msgspec.Struct, frozen=True):
    """The run as a tracker is told of it.

    `id` is the tracker's name for a run that it knows from an earlier part, and "" for a new one. `config` has every
    value of the configuration by its dotted name. `port` is of Prometheus' endpoint.
    """

    kind: Kind
    folder: str
    project: str
    config: Mapping[str, object]
    port: int = 0
    id: str = ""

    @property
    def name(self) -> str:
        """The name of the run's folder, for people."""
        return Path(self.folder).name


class Tracker(Protocol):
    """A library that numbers go to. Any method may raise, or never return: its process is ended then."""

    id: str
    """Its name for the run, with which another part goes on."""

    def send(self, points: Sequence[Point]) -> None:
        """Take in points, and return once the library has them."""
        ...

    def close(self, outcome: str) -> None:
        """Take in how the run ended, "" if it was killed, and return once nothing is left to be sent."""
        ...


def is_successful(outcome: str) -> bool:
    """Tell if a run has made all its updates."""
    return outcome == FINISHED
