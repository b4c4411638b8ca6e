"""A real Prometheus scrapes the endpoint, and answers every panel of the dashboard as Grafana would ask it."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_grafana import FILE, panels

from streamppo.telemetry.tracking import gauges
from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.trackers.run import TrackedRun

PROMETHEUS = shutil.which("prometheus")
DASHBOARD = json.loads(FILE.read_text())
WITHIN_S = 60.0
VERSION = 7
pytestmark = [
    pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus is installed (apt-get install prometheus)"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A Prometheus that has scraped an endpoint with a value for every name of the catalogue, twice at least."""
    pytest.importorskip("prometheus_client")
    from streamppo.telemetry.tracking.trackers.endpoint import PrometheusEndpoint

    endpoint = PrometheusEndpoint(TrackedRun("prometheus", str(tmp_path / "math"), "", {}))
    endpoint.send([Point(VERSION, 0.0, {entry + "0" * entry.endswith("_"): 0.5 for entry in gauges.TEXTS})])
    target = f"127.0.0.1:{endpoint.port}"
    (tmp_path / "prometheus.yml").write_text(
        "scrape_configs: [{ job_name: streamppo, scrape_interval: 1s, scrape_timeout: 1s,"
        f' static_configs: [{{ targets: ["{target}"] }}] }}]'
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS or "",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stderr=log,
        )
    try:
        address = f"http://{_address(tmp_path / 'log', process)}"
        _scraped(address)
        yield address
    finally:
        process.kill()
        process.wait()
        endpoint.close("")


def _address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    """Where it listens: its own log says so."""
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"address=(127\.0\.0\.1:[1-9]\d*)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def _scraped(address: str) -> None:
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        if ask(address, "query", query="count_over_time(streamppo_reward[1m]) >= 3")["result"]:
            return
        time.sleep(0.2)
    raise AssertionError("nothing was scraped three times")


def ask(address: str, what: str, **values: str) -> Any:
    try:
        with urllib.request.urlopen(f"{address}/api/v1/{what}?{urllib.parse.urlencode(values)}", timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it reads its log still
            return {"result": []}
        raise AssertionError(error.read().decode()) from error


def test_every_panel_has_a_curve(server: str) -> None:
    (variable,) = (one for one in DASHBOARD["templating"]["list"] if one["type"] == "query")
    asked = re.fullmatch(r"label_values\((\{.*\}), (\w+)\)", variable["query"])
    assert asked
    # What Grafana makes of label_values, and of the variable's "All" in a regular expression.
    runs = ask(server, f"label/{asked[2]}/values", **{"match[]": asked[1]})
    assert runs == ["math"]
    for panel in panels():
        (target,) = panel["targets"]
        result = ask(server, "query", query=target["expr"].replace("$run", f"({'|'.join(runs)})"))["result"]
        assert len(result) == 1, (panel["title"], result)
        assert result[0]["metric"]["run"] == "math"
        expected = 0.0 if "rate(" in target["expr"] else VERSION if panel["title"] == gauges.VERSION else 0.5
        assert float(result[0]["value"][1]) == expected, panel["title"]
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert label in result[0]["metric"], panel["title"]
