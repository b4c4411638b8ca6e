"""The `[telemetry]` part of the configuration: other programs that get the run's numbers. docs/tracking.md has each."""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from streamppo.config.base import Kind, Section

Tracker: TypeAlias = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]


class Endpoint(Kind, frozen=True, tag="endpoint"):
    """A server on 127.0.0.1 that Prometheus scrapes."""

    port: Port
    """The port that it listens at; the path is /metrics."""


class RayMetrics(Kind, frozen=True, tag="ray"):
    """Ray's own metrics, which a cluster's Prometheus scrapes already; needs ray[default] on the nodes."""


class Telemetry(Section, frozen=True):
    """Other programs that get the run's numbers. None of them can stop a run or slow it down."""

    trackers: tuple[Tracker, ...] = ()
    """Each gets the metrics and the configuration; its server and its key are in its own environment variables."""
    project: str = "streamppo"
    """Weights & Biases' and trackio's project, MLflow's experiment."""
    prometheus: Endpoint | RayMetrics | None = None
    """The way to Prometheus, if there is one."""

    def contradictions(self) -> Iterator[str]:
        """Every tracker once."""
        if len(set(self.trackers)) < len(self.trackers):
            yield f"trackers ({', '.join(self.trackers)}) must name each tracker once"
        if not self.project:
            yield "project must have a name"
