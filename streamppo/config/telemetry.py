"""The `[telemetry]` part of the configuration: other programs that get the run's metrics. See docs/tracking.md."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from streamppo.config.base import Kind, Section

Tracker: TypeAlias = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]


class Endpoint(Kind, frozen=True, tag="endpoint"):
    """A server on 127.0.0.1 that Prometheus scrapes."""

    port: Port
    """Its port; the path is /metrics."""


class RayMetrics(Kind, frozen=True, tag="ray"):
    """Ray's metrics; needs ray[default] on the nodes."""


class Telemetry(Section, frozen=True):
    """Other programs that get the run's metrics. None of them can stop a run or slow it down."""

    trackers: tuple[Tracker, ...] = ()
    """Trackers of metrics and configuration."""
    project: str = "streamppo"
    """Project or experiment of the trackers."""
    prometheus: Endpoint | RayMetrics | None = None
    """How Prometheus gets the metrics; none by default."""

    def contradictions(self) -> Iterator[str]:
        """Each tracker at most once, and a project name."""
        if len(set(self.trackers)) < len(self.trackers):
            yield f"trackers ({', '.join(self.trackers)}) must name each tracker once"
        if not self.project:
            yield "project must have a name"
