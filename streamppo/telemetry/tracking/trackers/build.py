"""Builds a tracker by its kind. A library is imported here, only if it is chosen."""

from collections.abc import Callable

from streamppo.telemetry.tracking.trackers.run import Kind, TrackedRun, Tracker


def build(run: TrackedRun) -> Tracker:
    """Open the tracker of kind `run.kind`. Raises the errors of its library."""
    return _opener(run.kind)(run)


def _opener(kind: Kind) -> Callable[[TrackedRun], Tracker]:
    match kind:
        case "tensorboard":
            from streamppo.telemetry.tracking.trackers.tensorboard_tracker import TensorBoard

            return TensorBoard
        case "wandb":
            from streamppo.telemetry.tracking.trackers.wandb_tracker import WeightsAndBiases

            return WeightsAndBiases
        case "trackio":
            from streamppo.telemetry.tracking.trackers.trackio_tracker import Trackio

            return Trackio
        case "mlflow":
            from streamppo.telemetry.tracking.trackers.mlflow_tracker import MLflow

            return MLflow
        case "prometheus":
            from streamppo.telemetry.tracking.trackers.endpoint import PrometheusEndpoint

            return PrometheusEndpoint
