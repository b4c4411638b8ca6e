"""Reports of replays: a name for each, and the verdict comes also where none can be written."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import COUNTERS, REPOSITORY

from streamppo import durable
from streamppo.commands import replay
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import report
from streamppo.errors import Diverged, RunError
from streamppo.queue.rules.records import Changes, PublishedVersion
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.types import UpdateReport

DIGESTS = {0: "a" * 64, 1: "b" * 64}
OTHERS = {0: "a" * 64, 1: "c" * 64}


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    """A run of one update, as far as its journal tells."""
    configfile.save(math_config(), tmp_path)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.configure(0, msgspec.msgpack.encode(math_config()))
    made = [PublishedVersion(version=version, digest=digest, archived=None) for version, digest in DIGESTS.items()]
    journal.write(Changes(COUNTERS), made)
    journal.close()
    return tmp_path


def written(run: Path) -> Path:
    return replay._report(run, (), {}, {}, [])


def remade(patch: pytest.MonkeyPatch, digests: dict[int, str]) -> None:
    """The learner makes these weights."""
    reports = [UpdateReport(version=1, metrics={"entropy": 1.0}, lag_histogram={})]
    patch.setattr(replay, "remake", lambda *_: (digests, reports))


def test_a_report_is_json_also_of_an_update_whose_loss_is_not_finite(tmp_path: Path) -> None:
    metrics = {"policy_loss": float("nan"), "entropy": 1.0, "tokens_trained": 9.0, "tokens_too_old": 0.0}
    path = replay._report(tmp_path, (), {}, {}, [UpdateReport(version=1, metrics=metrics, lag_histogram={})])
    (update,) = msgspec.json.decode(path.read_bytes())["updates"]
    assert update["replayed"] == {**metrics, "policy_loss": None}
    (line,) = report.replay_view(path).lines
    assert "update" in line and "policy_loss" not in metrics_file.numbers(line)


def test_a_number_stands_for_one_report_whatever_is_deleted(tmp_path: Path) -> None:
    assert [written(tmp_path).name for _ in range(3)] == ["1.json", "2.json", "3.json"]
    (tmp_path / "replays" / "1.json").unlink()
    (tmp_path / "replays" / "notes.txt").touch()
    assert written(tmp_path).name == "4.json"
    (tmp_path / "replays" / "2.json").unlink()
    assert written(tmp_path).name == "5.json"


def test_replays_at_the_same_time_have_reports_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        names = [path.name for path in threads.map(lambda _: written(tmp_path), range(64))]
    assert sorted(names) == sorted(f"{number}.json" for number in range(1, 65))
    assert sorted(path.name for path in (tmp_path / "replays").iterdir()) == sorted(names)


def test_a_replay_that_died_leaves_no_half_report_and_its_number_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(durable, "settle", die)
        written(tmp_path)
    assert written(tmp_path).name == "2.json"
    assert [path.name for path in (tmp_path / "replays").glob("*.json")] == ["2.json"]


def refused(run: Path) -> None:
    (run / "replays").write_text("a file, as on a disk that is full")


def test_a_verdict_comes_without_a_report(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(run)
    remade(monkeypatch, DIGESTS)
    assert replay.replay(run, None, ()) == 0
    said = capsys.readouterr().out
    assert "2 versions, all of them bit for bit as recorded" in said
    assert f"no report: {run / 'replays'}: cannot be written: " in said
    remade(monkeypatch, OTHERS)
    with pytest.raises(Diverged, match="1 of 2 versions differ from the recorded weights, first version 1"):
        replay.replay(run, None, ())


def test_what_if_shows_its_table_before_it_fails_to_write_its_report(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(run)
    remade(monkeypatch, OTHERS)
    with pytest.raises(RunError, match="replays: cannot be written"):
        replay.replay(run, None, ("learner.lr=1e-5",))
    shown = capsys.readouterr().out
    assert "entropy" in shown
    assert "a fork behaved as its replay up to update 64 (entropy), 8 (proximal_kl), " in " ".join(shown.split())


def test_how_far_a_what_if_holds_is_what_was_measured() -> None:
    measured = json.loads((REPOSITORY / "benchmarks" / "results" / "what-if-cpu.json").read_text())
    assert len(measured["runs"]) == 60
    assert {name: updates for name, updates in measured["horizons"].items() if updates} == replay.HORIZONS
    page = (REPOSITORY / "docs" / "fork.md").read_text()
    for name, reach in measured["horizons"].items():
        lines = [line for line in measured["summary"] if line["metric"] == name]
        *_, last = [", ".join(str(line[verdict]) for verdict in ("agrees", "silent", "opposite")) for line in lines]
        within = [line for line in lines if line["horizon"] <= reach]
        until = ", ".join(str(sum(line[verdict] for line in within)) for verdict in ("agrees", "silent", "opposite"))
        shown = f"{name} | {reach} | {until if reach else ''} | {last} |".replace("  ", " ")
        assert shown in page.replace("`", "").replace("*", ""), shown


def test_a_divergence_has_its_report(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remade(monkeypatch, OTHERS)
    with pytest.raises(Diverged):
        replay.replay(run, None, ())
    told: Any = json.loads((run / "replays" / "1.json").read_text())
    assert told["same"] == [0] and told["digests"]["1"] == OTHERS[1]
