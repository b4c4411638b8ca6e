"""Trackers: they get every number once, another part continues, and none of them can stop or slow a run."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from fake_tensorboard import install, told

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.telemetry import catalogue, metrics_file
from streamppo.telemetry.metrics_file import FINISHED, METRICS, Line, Tail
from streamppo.telemetry.record import SUMMARY, RunRecord
from streamppo.telemetry.tracking import process, sinks
from streamppo.telemetry.tracking.points import Points
from streamppo.telemetry.tracking.process import read_lines
from streamppo.telemetry.tracking.sinks import Sinks, runs

DEFAULT_RUN = Path(__file__).with_name("default_run.jsonl").read_text().splitlines(keepends=True)
OTHERS: list[Any] = [
    {"part": 1, "wall_s": 1.0, "version": 0},
    {"queue": 7, "wall_s": 2.0, "in_flight": 5},
    {"engine": "rollout-0", "wall_s": 3.0, "version": 2, "tokens": 9, "busy_s": 1.5, "idle_s": 0.5, "sampled": None},
    {
        **{"engine": "rollout-1", "wall_s": 3.5, "version": 2, "tokens": 9, "busy_s": 1.5, "idle_s": 0.5},
        **{"prefix_reused": 0.75, "context_reused": 0.9, "kv_age": 1.5, "kv_ages": {"1": 2, "2": 2}},
        **{"agents": {"requests": 3}, "sampled": None},
    },
    {"restart": "rollout", "wall_s": 4.0, "reason": "killed"},
    {"restart": "rollout", "wall_s": 5.0, "reason": "killed"},
    {"evaluation": 3, "wall_s": 6.0, "accuracy": None, "count": 0, "failed": 4, "versions": [3, 3]},
    {"remade": 3, "wall_s": 7.0, "reward": 1.0, "tokens_trained": 5, "tokens_too_old": 1, "lag_histogram": {"0": 6}},
    {"phases": "queue", "wall_s": 8.0, "spent": {}},
    {"redone": 3, "wall_s": 9.0},
    {"end": FINISHED, "wall_s": 10.0},
]


@pytest.fixture
def config() -> Config:
    return configfile.load(REPOSITORY / "configs" / "math.toml", ['telemetry.trackers=["tensorboard"]'])


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have trackers' processes import a `tensorboard` that does as the plan says."""

    def fake(*, impatient: bool = False, **plan: str) -> None:
        for name, value in install(tmp_path / "packages", plan, impatient=impatient).items():
            monkeypatch.setenv(name, value)

    return fake


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "math"
    folder.mkdir()
    return folder


def write(run: Path, lines: list[str]) -> None:
    with (run / METRICS).open("a") as file:
        file.writelines(lines)


def numbers_of(lines: list[str]) -> int:
    parsed = [metrics_file.parse(line.encode()) for line in lines]
    return sum(len(point.values) for point in Points().make([line for line in parsed if line], 0.0))


def wait_until_lost(tracked: Sinks) -> None:
    """Look as the driver does, until no tracker is left."""
    deadline = time.monotonic() + 60
    while tracked._processes and time.monotonic() < deadline:
        tracked.check()
        time.sleep(0.05)
    assert not tracked._processes


# --- what they get -------------------------------------------------------------------------------------------


def test_every_number_of_a_run_arrives_once_over_two_parts(
    run: Path, config: Config, faked: Callable[..., None]
) -> None:
    faked()
    for begin in (0, 20):
        part = Sinks(config, run)
        write(run, DEFAULT_RUN[begin : begin + 20])
        part.close()
    found = [one for one in told(run) if one != "closed"]
    assert len(found) == numbers_of(DEFAULT_RUN[:40])
    assert len({(name, step) for name, _, step, *_ in found}) == len(found)
    rewards = [(step, value) for name, value, step, *_ in found if name == "reward"]
    lines = [json.loads(line) for line in DEFAULT_RUN[:40]]
    assert rewards == [(line["update"], line["reward"]) for line in lines if "update" in line]
    # Once in each part: that is enough for TensorBoard.
    assert [one[4] for one in found if one[0] == "reward" and one[4]] == 2 * [catalogue.ENTRIES["reward"]]


def test_a_part_whose_driver_is_killed_is_sent_to_the_end(
    run: Path, config: Config, faked: Callable[..., None]
) -> None:
    """Its standard input ends with the driver; the lines before that are there."""
    faked()
    write(run, DEFAULT_RUN[:20])
    script = (
        "import os, signal\nfrom pathlib import Path\nfrom streamppo.config import file\n"
        "from streamppo.telemetry.tracking.sinks import Sinks\n"
        "config = file.load(Path({config!r}), ['telemetry.trackers=[\"tensorboard\"]'])\n"
        "Sinks(config, Path({run!r}))\nos.kill(os.getpid(), signal.SIGKILL)"
    ).format(config=str(REPOSITORY / "configs" / "math.toml"), run=str(run))
    driver = subprocess.run([sys.executable, "-c", script], check=False)
    assert driver.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while "closed" not in told(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert told(run)[-1] == "closed" and len(told(run)) - 1 == numbers_of(DEFAULT_RUN[:20])


def test_other_lines_have_names_of_the_catalogue_too() -> None:
    points = Points(2)
    found = [(point.version, point.at_s, dict(point.values)) for point in points.make(OTHERS, 110.0)]
    engine = {"version": 2.0, "tokens": 9.0, "busy_s": 1.5, "idle_s": 0.5}
    reuse = {"prefix_reused": 0.75, "context_reused": 0.9, "kv_age": 1.5}
    assert found == [
        (2, 102.0, {"queue_ready": 7, "queue_in_flight": 5}),
        (2, 103.0, {f"engine_{name}_rollout-0": value for name, value in engine.items()}),
        (2, 103.5, {f"engine_{name}_rollout-1": value for name, value in {**engine, **reuse}.items()}),
        (2, 104.0, {"restarts_rollout": 1}),
        (2, 105.0, {"restarts_rollout": 2}),
        (3, 106.0, {"evaluation_failed": 4}),
        (3, 107.0, {"wall_s": 7.0, "reward": 1.0, "tokens_trained": 5, "tokens_too_old": 1}),
    ]
    assert points.outcome == FINISHED
    for _, _, values in found:
        assert all(catalogue.find(name) for name in values)


def test_a_name_is_found_whole_before_it_is_found_by_its_begin() -> None:
    assert catalogue.find("reward") == ("reward", "", catalogue.ENTRIES["reward"])
    assert catalogue.find("ess_lag_3-4") == ("ess_lag_", "3-4", catalogue.SOMETIMES["ess_lag_"])
    assert catalogue.find("nothing") is None


def test_the_follower_reads_whole_lines_once_and_a_new_file_from_its_begin(run: Path) -> None:
    tail = Tail(run)
    assert read_lines(tail) == []
    write(run, [DEFAULT_RUN[0], "no line\n", DEFAULT_RUN[1][:-1]])
    assert [next(iter(line)) for line in read_lines(tail)] == ["part"]
    write(run, ["\n"])
    assert [next(iter(line)) for line in read_lines(tail)] == ["evaluation"]
    assert read_lines(tail) == [] and read_lines(Tail(run, tail.end)) == []
    (run / "other").write_text("".join(DEFAULT_RUN[:40]))
    os.replace(run / "other", run / METRICS)
    assert len(read_lines(tail)) == 40


def test_a_long_file_is_read_in_pieces(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MOST_BYTES", 3000)
    write(run, DEFAULT_RUN[:40])
    tail, parts = Tail(run), list[list[Line]]()
    while lines := read_lines(tail):
        parts.append(lines)
    assert len(parts) > 5 and sum(map(len, parts)) == 40


def test_a_line_without_a_version_stands_at_the_newest_one_of_the_part_before(
    run: Path, config: Config, faked: Callable[..., None]
) -> None:
    faked()
    for lines in (DEFAULT_RUN[:20], [json.dumps(OTHERS[1]) + "\n"]):
        part = Sinks(config, run)
        write(run, lines)
        part.close()
    newest = max(line.get("update", 0) for line in map(json.loads, DEFAULT_RUN[:20]))
    assert [one[2] for one in told(run) if one[0] == "queue_ready"] == [newest]


# --- what they cannot do -------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"import": "raise"}, "at 10.0.0.1"),
        ({"open": "raise"}, "at 10.0.0.1"),
        ({"add": "raise"}, "at 10.0.0.1"),
        ({"open": "die"}, "its process has ended"),
        ({"import": "hang"}, "it did not answer in time"),
        ({"add": "hang"}, "it did not answer in time"),
    ],
)
def test_a_tracker_that_fails_is_given_up_with_one_warning(
    run: Path,
    config: Config,
    faked: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    plan: dict[str, str],
    reason: str,
) -> None:
    faked(impatient="hang" in plan.values(), **plan)
    write(run, DEFAULT_RUN[:20])
    with caplog.at_level(logging.WARNING):
        tracked = Sinks(config, run)
        wait_until_lost(tracked)
        tracked.check()
        tracked.close()
    (warning,) = caplog.messages
    assert warning.startswith("tensorboard has ended, the run continues without it: ") and reason in warning
    assert str(run / "logs" / "tensorboard.log") in warning


def test_the_run_that_is_resumed_sends_what_a_failed_tracker_has_not_got(
    run: Path, config: Config, faked: Callable[..., None]
) -> None:
    faked(flush="raise")
    write(run, DEFAULT_RUN[:20])
    wait_until_lost(Sinks(config, run))
    (run / "told.jsonl").unlink()
    faked()
    Sinks(config, run).close()
    assert len(told(run)) - 1 == numbers_of(DEFAULT_RUN[:20])


@pytest.mark.parametrize("where", ["close", "flush"])
def test_a_tracker_that_hangs_at_the_end_is_waited_for_so_long_and_killed(
    run: Path,
    config: Config,
    faked: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    faked(**{where: "hang"})
    monkeypatch.setattr(sinks, "END_S", 1.0)
    tracked = Sinks(config, run)
    (child,) = tracked._processes.values()
    write(run, DEFAULT_RUN[:20])
    with caplog.at_level(logging.WARNING):
        tracked.close()
        tracked.close()
    (warning,) = caplog.messages
    assert "it did not send the last lines within 1 s" in warning
    assert child.returncode == -signal.SIGKILL


def test_a_hanging_tracker_costs_a_run_neither_a_line_nor_its_summary(
    run: Path, config: Config, faked: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(open="hang")
    monkeypatch.setattr(sinks, "END_S", 0.2)
    record = RunRecord(run, time.perf_counter(), 1, 30, sinks=Sinks(config, run))
    for _ in range(1000):
        record.restart("rollout", "killed")
        record.tick("update 1")
    record.close(FINISHED, None, [])
    assert json.loads((run / SUMMARY).read_text())["restarts"]["rollout"] == 1000


def test_ctrl_c_is_for_the_driver_alone(run: Path, config: Config, faked: Callable[..., None]) -> None:
    faked()
    tracked = Sinks(config, run)
    (child,) = tracked._processes.values()
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    tracked.close()


def test_a_run_without_trackers_has_no_process_and_no_folder(run: Path) -> None:
    tracked = Sinks(configfile.load(REPOSITORY / "configs" / "math.toml"), run)
    tracked.check()
    tracked.close()
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"sent": "x"}'])
def test_a_damaged_progress_file_begins_again(
    run: Path, config: Config, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (told_of,) = runs(config, run)
    path = process.progress_path(run, told_of.kind)
    path.parent.mkdir()
    path.write_bytes(content)
    assert process._read(path) == process.Progress()
    assert f"{path}: cannot be read, so all lines are sent again" in capsys.readouterr().err


def test_a_tracker_is_told_of_the_configuration_by_dotted_names(run: Path, config: Config) -> None:
    (told_of,) = runs(config, run)
    assert (
        told_of.name == "math"
        and told_of.project == "streamppo"
        and told_of.config["queue.max_lag"] == config.queue.max_lag
    )
    assert process.progress_path(run, told_of.kind) == run / "trackers" / "tensorboard.json"
