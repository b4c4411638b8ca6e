"""A server on 127.0.0.1 with the newest numbers as text, which Prometheus scrapes."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server  # pyright: ignore[reportMissingImports]
from prometheus_client.core import GaugeMetricFamily  # pyright: ignore[reportMissingImports]
from prometheus_client.registry import Collector  # pyright: ignore[reportMissingImports]

from streamppo.telemetry.tracking import names
from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.trackers.run import Run

LOOPBACK = "127.0.0.1"


class Endpoint(Collector):
    """Every number that came last, as a gauge with the run's name on it."""

    def __init__(self, run: Run) -> None:
        self.id = ""
        self._run = run.name
        self._newest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(run.port, LOOPBACK, registry)
        self.address, self.port = self._server.server_address[:2]

    def send(self, points: Sequence[Point]) -> None:
        """Remember the newest numbers."""
        for point in points:
            # One assignment: a scrape of the server's thread sees the numbers before it or those after it.
            version = max(point.version, self._newest.get(names.VERSION, 0))
            self._newest = {**self._newest, **point.values, names.VERSION: version}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Give a scrape all gauges; metrics of one name stand together."""
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in self._newest.items():
            if gauge := names.gauge(metric):
                family = families.setdefault(gauge.name, GaugeMetricFamily(gauge.name, gauge.text, labels=gauge.labels))
                family.add_metric([self._run, gauge.of] if gauge.of else [self._run], value)
        yield from families.values()

    def close(self, outcome: str) -> None:
        """Close the port: numbers of a run that has ended are not scraped."""
        self._server.shutdown()
        self._server.server_close()
