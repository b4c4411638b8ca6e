"""MLflow: sends to the server at MLFLOW_TRACKING_URI, or to the library's default on this machine."""

import re
from collections.abc import Sequence

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

from streamppo.telemetry.metrics_file import FINISHED
from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.trackers.run import TrackedRun

MOST_METRICS, MOST_PARAMS = 1000, 100
"""Maximum numbers of metrics and of parameters in one call to a server."""
LONGEST = 500
"""Maximum number of characters of a parameter's value that every server accepts."""
REFUSED = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow does not allow in names, such as the + of `ess_lag_65+`."""


class MLflow:
    """A run of an MLflow experiment. Calls to the server are synchronous."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        if run.id:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(run.project)
        self.id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(name, str(value)[:LONGEST]) for name, value in run.config.items()]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.id, params=params[begin : begin + MOST_PARAMS])

    def send(self, points: Sequence[Point]) -> None:
        metrics = [
            Metric(REFUSED.sub("_", name), value, round(1e3 * point.at_s), point.version)
            for point in points
            for name, value in point.values.items()
        ]
        for begin in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self.id, metrics=metrics[begin : begin + MOST_METRICS])

    def close(self, outcome: str) -> None:
        """Set the run's final status: FINISHED if the run made all its updates, otherwise KILLED."""
        self._client.set_terminated(self.id, "FINISHED" if outcome == FINISHED else "KILLED")
