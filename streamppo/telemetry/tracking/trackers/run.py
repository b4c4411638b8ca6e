"""The description of a run for trackers, and the protocol of a tracker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import msgspec

from streamppo.config.sections import Tracker as Library
from streamppo.telemetry.metrics_file import FINISHED
from streamppo.telemetry.tracking.points import Point

Kind: TypeAlias = Library | Literal["prometheus"]


class TrackedRun(msgspec.Struct, frozen=True):
    """The run's description for a tracker.

    `id`: the tracker's id of a resumed run, "" for a new one. `config`: every value of the configuration by dotted
    name. `port`: of the Prometheus endpoint.
    """

    kind: Kind
    folder: str
    project: str
    config: Mapping[str, object]
    port: int = 0
    id: str = ""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return Path(self.folder).name


class Tracker(Protocol):
    """A tracker library. Any method may raise or never return; then its process is ended.

    `id` is the library's id of the run, with which a resumed run continues.
    """

    id: str

    def send(self, points: Sequence[Point]) -> None:
        """Send points; return once the library has them."""
        ...

    def close(self, outcome: str) -> None:
        """Finish with `outcome` ("" if the run was killed); block until everything is sent."""
        ...


def is_successful(outcome: str) -> bool:
    """True if a run has made all its updates."""
    return outcome == FINISHED
