"""Sets the gauges as metrics of Ray. Ray drops a gauge that is not set for some time, so each line sets all gauges."""

import logging
import time

from ray.exceptions import RayError
from ray.util.metrics import Gauge

from streamppo.telemetry.metrics_file import Line
from streamppo.telemetry.tracking import gauges
from streamppo.telemetry.tracking.points import Points

log = logging.getLogger(__name__)


class RayGauges:
    """The gauges of the run named `run`. Ray must be running at the first `line` that has numbers."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._points = Points()
        self._gauges: dict[str, Gauge] = {}
        self._newest: dict[str, float] = {}
        self._lost = False

    def line(self, line: Line) -> None:
        """Set the gauges to the newest numbers, including those of `line`. After an error of Ray, do nothing."""
        if self._lost:
            return
        try:
            for point in self._points.make([line], time.time()):
                self._newest |= {**point.values, gauges.VERSION: self._points.version}
            for metric, value in self._newest.items():
                self._set(metric, value)
        except (RayError, RuntimeError, ValueError, TypeError) as error:
            self._lost = True
            log.warning("Ray's metrics have stopped, the run continues without them: %s", error)

    def _set(self, metric: str, value: float) -> None:
        if gauge := gauges.gauge(metric):
            exported = self._gauges.get(gauge.name) or Gauge(gauge.name, gauge.text, gauge.labels)
            self._gauges[gauge.name] = exported
            exported.set(value, dict(zip(gauge.labels, (self._run, gauge.of), strict=False)))
