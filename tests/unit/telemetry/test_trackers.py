"""The real libraries, each in its process as a run has it, over two parts; the missing ones are skipped."""

import http.client
import importlib.util
import json
import sqlite3
import urllib.request
from pathlib import Path

import pytest
from conftest import REPOSITORY

from streamppo.config import file as configfile
from streamppo.telemetry import catalogue
from streamppo.telemetry.metrics_file import FINISHED, METRICS
from streamppo.telemetry.tracking import ray_metrics
from streamppo.telemetry.tracking.gauges import TEXTS, name
from streamppo.telemetry.tracking.points import Point
from streamppo.telemetry.tracking.ray_metrics import RayGauges
from streamppo.telemetry.tracking.sinks import Sinks
from streamppo.telemetry.tracking.trackers.run import TrackedRun

LINES = Path(__file__).with_name("default_run.jsonl").read_text().splitlines(keepends=True)[:40]
REWARDS = [(line["update"], line["reward"]) for line in map(json.loads, LINES) if "update" in line]
END = json.dumps({"end": FINISHED, "wall_s": 99.0}) + "\n"


def tracked(run: Path, kind: str) -> str:
    """Send two parts of a run; return the tracker's id for it, the same in both."""
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"needs {kind}")
    config = configfile.load(REPOSITORY / "configs" / "math.toml", [f'telemetry.trackers=["{kind}"]'])
    ids = set[str]()
    run.mkdir()
    for lines in (LINES[:20], [*LINES[20:], END]):
        part = Sinks(config, run)
        with (run / METRICS).open("a") as file:
            file.writelines(lines)
        part.close()
        ids.add(json.loads((run / "trackers" / f"{kind}.json").read_bytes())["id"])
    (same,) = ids
    return same


def test_tensorboard_has_every_update_once(tmp_path: Path) -> None:
    tracked(tmp_path / "math", "tensorboard")
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found = list[tuple[int, float]]()
    texts = set[str]()
    for path in sorted((tmp_path / "math" / "tensorboard").iterdir()):
        for event in loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "reward":
                    found.append((event.step, round(value.tensor.float_val[0], 4)))
                    texts.add(value.metadata.summary_description)
    assert sorted(found) == REWARDS
    assert catalogue.ENTRIES["reward"] in texts


def test_weights_and_biases_offline_has_one_run_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_id = tracked(tmp_path / "math", "wandb")
    found = sorted((tmp_path / "math" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert found
    # The library's own format: the names stand in it as they are.
    content = b"".join(path.read_bytes() for path in found)
    assert content.count(b"behavior_kl_k1") >= len(REWARDS)
    assert b"queue.max_lag" in content or b"max_lag" in content


def test_mlflow_has_every_update_once_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_id = tracked(tmp_path / "math", "mlflow")
    (run,) = (tmp_path / "mlruns").glob(f"*/{run_id}")
    rows = [line.split() for line in (run / "metrics" / "reward").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in rows] == REWARDS
    assert (run / "params" / "queue.max_lag").is_file()
    assert "status: 3" in (run / "meta.yaml").read_text()


def test_trackio_has_every_line_of_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    name = tracked(tmp_path / "math", "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "streamppo.db") as database:
        rows = database.execute("select run_name, step from metrics").fetchall()
    assert {run for run, _ in rows} == {name}
    assert {version for version, _ in REWARDS} <= {step for _, step in rows}


# --- Prometheus ----------------------------------------------------------------------------------------------


def test_the_endpoint_gives_the_newest_numbers_on_loopback_alone(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    from streamppo.telemetry.tracking.trackers.endpoint import PrometheusEndpoint

    endpoint = PrometheusEndpoint(TrackedRun("prometheus", str(tmp_path / "math"), "", {}))
    try:
        endpoint.send([Point(7, 0.0, {"reward": 0.5, "ess_lag_3-4": 0.9, "unknown": 1.0})])
        endpoint.send([Point(8, 0.0, {"reward": 0.75, "ess_lag_0": 1.0}), Point(6, 0.0, {"evaluation_accuracy": 0.5})])
        assert endpoint.address == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        endpoint.close("")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    samples = [one for family in families.values() for one in family.samples]
    found = {(one.name, one.labels.get("of", "")): one.value for one in samples}
    assert found == {
        ("streamppo_reward", ""): 0.75,
        ("streamppo_ess_lag_of", "0"): 1.0,
        ("streamppo_ess_lag_of", "3-4"): 0.9,
        ("streamppo_evaluation_accuracy", ""): 0.5,
        ("streamppo_version", ""): 8.0,
    }
    assert families["streamppo_reward"].documentation == catalogue.ENTRIES["reward"]
    assert {one.labels["run"] for one in samples} == {"math"}


def test_every_name_of_the_catalogue_makes_a_gauge_of_its_own() -> None:
    made = [name(entry) for entry in TEXTS]
    assert len(set(made)) == len(made)
    assert all(gauge.isidentifier() for gauge in made)


class FakeGauge:
    """A gauge of Ray's that keeps its value."""

    made: dict[str, "FakeGauge"]
    broken = False

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.description, self.tag_keys = description, tag_keys
        self.values: dict[tuple[str, ...], float] = {}
        self.sets = 0
        assert name not in self.made
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        if self.broken:
            raise RuntimeError("no such worker")
        assert tuple(tags) == self.tag_keys
        self.values[tuple(tags.values())] = value
        self.sets += 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9", 200),
        ("localhost", 200),
        ("[::1]:9", 200),
        ("evil.example", 400),
        ("localhost.evil.example:80", 400),
        ("127.0.0.1.nip.io", 400),
        ("127.0.0.1@evil.example", 400),
        ("[", 400),
        ("", 400),
    ],
)
def test_the_endpoint_is_answered_under_names_of_loopback_alone(tmp_path: Path, host: str, status: int) -> None:
    pytest.importorskip("prometheus_client")
    from streamppo.telemetry.tracking.trackers.endpoint import PrometheusEndpoint

    endpoint = PrometheusEndpoint(TrackedRun("prometheus", str(tmp_path / "math"), "", {}))
    try:
        endpoint.send([Point(7, 0.0, {"reward": 0.5})])
        connection = http.client.HTTPConnection("127.0.0.1", endpoint.port)
        connection.request("GET", "/metrics", headers={"Host": host})
        answer = connection.getresponse()
        assert (answer.status, b"streamppo_reward" in answer.read()) == (status, status == 200)
        connection.close()
    finally:
        endpoint.close("")


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeGauge]:
    monkeypatch.setattr(FakeGauge, "made", {}, raising=False)
    monkeypatch.setattr(ray_metrics, "Gauge", FakeGauge)
    return FakeGauge.made


def test_rays_gauges_are_those_of_the_endpoint(gauges: dict[str, FakeGauge]) -> None:
    sink = RayGauges("math")
    for line in LINES:
        sink.line(json.loads(line))
    assert gauges["streamppo_reward"].values == {("math",): REWARDS[-1][1]}
    assert gauges["streamppo_reward"].description == catalogue.ENTRIES["reward"]
    assert gauges["streamppo_version"].values == {("math",): REWARDS[-1][0]}
    assert set(gauges["streamppo_ess_lag_of"].values) == {("math", "0"), ("math", "1"), ("math", "2")}


def test_what_only_some_lines_have_is_set_again_with_every_line(gauges: dict[str, FakeGauge]) -> None:
    sink = RayGauges("math")
    sink.line({"evaluation": 0, "wall_s": 0.0, "accuracy": 0.25, "failed": 0})
    for update in (1, 2, 3):
        sink.line({"update": update, "wall_s": 1.0, "lag_histogram": {}, "reward": 0.5})
    assert gauges["streamppo_evaluation_accuracy"].values == {("math",): 0.25}
    assert (gauges["streamppo_evaluation_accuracy"].sets, gauges["streamppo_reward"].sets) == (4, 3)


def test_an_error_of_ray_ends_its_gauges_and_nothing_else(
    gauges: dict[str, FakeGauge], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeGauge, "broken", True)
    sink = RayGauges("math")
    for line in LINES:
        sink.line(json.loads(line))
    (warning,) = caplog.messages
    assert "have stopped" in warning and "no such worker" in warning
