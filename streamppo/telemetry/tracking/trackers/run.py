"""The description of a run that a tracker gets, and the protocol of a tracker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import msgspec

from streamppo.config.sections import Tracker as Library
from streamppo.telemetry.tracking.points import Point

Kind: TypeAlias = Library | Literal["prometheus"]


class TrackedRun(msgspec.Struct, frozen=True):
    """A run for a tracker. `id` is the tracker's id of the run, "" at first. `config` has values by dotted name."""

    kind: Kind
    folder: str
    project: str
    config: Mapping[str, object]
    port: int = 0
    id: str = ""

    @property
    def name(self) -> str:
        return Path(self.folder).name


class Tracker(Protocol):
    """A tracker library; an error or a timeout of a method ends its process. `id` is the library's id of the run."""

    id: str

    def send(self, points: Sequence[Point]) -> None:
        """Pass points to the library, which may send them later."""

    def close(self, outcome: str) -> None:
        """Close the run with `outcome` ("" if the driver was killed), and wait until everything is sent."""
