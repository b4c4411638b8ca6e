"""Serves the newest numbers as text on 127.0.0.1, from where Prometheus reads them.

The server answers only requests whose Host is a loopback name: a foreign web page could read the numbers through a
domain name that resolves to 127.0.0.1 (DNS rebinding).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, start_http_server  # pyright: ignore[reportMissingImports]
from prometheus_client.core import GaugeMetricFamily  # pyright: ignore[reportMissingImports]
from prometheus_client.registry import Collector  # pyright: ignore[reportMissingImports]

from streamppo.telemetry.tracking import gauges
from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.trackers.run import TrackedRun

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost", "::1")
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class PrometheusEndpoint(Collector):
    """Serves the newest value of each number as a gauge, labelled with the run's name."""

    def __init__(self, run: TrackedRun) -> None:
        self.id = ""
        self._run = run.name
        self._newest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(run.port, LOOPBACK, registry)
        answer = self._server.get_app()
        assert answer is not None
        self._server.set_app(_refuse_foreign_hosts(answer))
        self.address, self.port = self._server.server_address[:2]

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            # With one assignment, a request in the server's thread sees either all old or all new numbers.
            version = max(point.version, self._newest.get(gauges.VERSION, 0))
            self._newest = {**self._newest, **point.values, gauges.VERSION: version}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all gauges for a request. Gauges with the same name and different labels form one family."""
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in self._newest.items():
            if gauge := gauges.gauge(metric):
                family = families.setdefault(gauge.name, GaugeMetricFamily(gauge.name, gauge.text, labels=gauge.labels))
                family.add_metric([self._run, gauge.of] if gauge.of else [self._run], value)
        yield from families.values()

    def close(self, outcome: str) -> None:
        """Close the port: the numbers of a run that has ended are not served."""
        self._server.shutdown()
        self._server.server_close()


def _refuse_foreign_hosts(answer: Application) -> Application:
    def guarded(request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if _host(request.get("HTTP_HOST", "")) in NAMES:
            return answer(request, start)
        start("400 Bad Request", [("Content-Type", "text/plain")])
        return [b"this server answers only requests for a loopback name (127.0.0.1, localhost, ::1)\n"]

    return guarded


def _host(header: str) -> str:
    """Return the host of a Host header without its port; "" if the header is empty or invalid."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
