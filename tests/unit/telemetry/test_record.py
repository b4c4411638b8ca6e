"""What is said of a whole run: over any number of parts, however each of them ended."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from streamppo.commands import replay as rerun
from streamppo.errors import RunError
from streamppo.run import _summary_line
from streamppo.telemetry import metrics_file as lines
from streamppo.telemetry.catalogue import BESIDE, LINES
from streamppo.telemetry.record import FINISHED, SUMMARY, Record
from streamppo.types import EngineReport, EvaluationReport, UpdateReport

METRICS = {"entropy": 1.0, "ess": 1.0, "lag_mean": 0.0, "update_s": 2.0, "push_ms": 3.0, "tokens_trained": 10.0}


def report(version: int) -> UpdateReport:
    metrics = {**METRICS, "reward": version / 100, "wait_s": 0.5 if version > 20 else 0.0}
    return UpdateReport(version=version, metrics=metrics, lag_histogram={0: 9, version % 3: 1})


def answers(correct: int) -> list[EvaluationReport]:
    return [EvaluationReport(actor="rollout-0", correct=correct, count=10, failed=0, min_version=0, max_version=0)]


def part(folder: Path, lasting_s: float = 0.0) -> Record:
    """A part of a run whose command began so long ago."""
    return Record(folder, time.perf_counter() - lasting_s, seed=1, updates=30)


def updates(record: Record, first: int, last: int) -> None:
    for version in range(first, last + 1):
        record.update(report(version))


def said(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SUMMARY).read_text())


def in_three_parts(folder: Path) -> Record:
    """Thirty updates: one part was stopped, one was killed, the last one finishes."""
    stopped = part(folder, lasting_s=100)
    stopped.evaluation(0, answers(1))
    stopped.restart("rollout", "it was killed")
    updates(stopped, 1, 10)
    stopped.close("Interrupted: stopped by SIGINT", None, [])
    killed = part(folder, lasting_s=1000)
    killed.evaluation(10, answers(4))
    killed.restart("rollout", "it was killed")
    killed.restart("learner", "it was killed")
    updates(killed, 9, 20)
    with (folder / lines.METRICS).open("a") as file:
        file.write('{"update": 21, "wall_')
    killed._file.close()
    last = part(folder, lasting_s=10_000)
    updates(last, 18, 30)
    last.evaluation(30, answers(9))
    return last


def test_a_run_in_three_parts_is_told_as_one(tmp_path: Path) -> None:
    whole = in_three_parts(tmp_path)
    whole.close(FINISHED, None, [])
    found = said(tmp_path)
    assert found["outcome"] == FINISHED
    assert (found["updates"], found["pushes"], found["parts"]) == (30, 30, 3)
    assert found["restarts"] == {"rollout": 2, "queue": 0, "learner": 1}
    assert found["redone"] == 2 + 3, "9 and 10, then 18 to 20"
    assert found["evaluations"] == [[0, 0.1], [10, 0.4], [30, 0.9]]
    assert found["eval_accuracy"] == {"start": 0.1, "final": 0.9}
    assert found["reward"] == {"start": pytest.approx(0.055), "final": pytest.approx(0.255)}
    assert found["tokens_trained"] == 300
    assert found["lag"]["histogram"] == {"0": 10 + 20 * 9, "1": 10, "2": 10}
    assert found["lag"]["mean"] == pytest.approx(30 / 210)
    assert found["learner_idle_share"] == pytest.approx(10 * 0.5 / (30 * 2))
    assert found["push_ms"] == 3
    assert found["first_update_s"] == pytest.approx(100, abs=50)
    assert found["wall_s"] == pytest.approx(11_100, abs=50)


def test_seconds_never_go_back_and_no_update_is_missing_or_there_twice(tmp_path: Path) -> None:
    in_three_parts(tmp_path).close(FINISHED, None, [])
    seconds = [line["wall_s"] for line in lines.read(tmp_path)]
    assert seconds == sorted(seconds)
    assert [line["update"] for line in lines.updates(tmp_path)] == list(range(1, 31))


def test_every_kind_of_line_is_in_the_catalogue(tmp_path: Path) -> None:
    in_three_parts(tmp_path).close(FINISHED, None, [])
    assert {next(iter(line)) for line in lines.read(tmp_path)} == LINES.keys()
    assert all(line.keys() == BESIDE.keys() | report(1).metrics.keys() for line in lines.updates(tmp_path))


def test_the_last_line_is_about_the_whole_run(tmp_path: Path) -> None:
    line = _summary_line(in_three_parts(tmp_path).close(FINISHED, None, []))
    assert line.startswith("30 updates in 111")
    assert line.endswith(" s in 3 parts: accuracy 0.100 -> 0.900, mean lag 0.14 (max 2), learner idle 8%")


def test_a_run_that_had_made_everything_already_has_its_last_line_too(tmp_path: Path) -> None:
    in_three_parts(tmp_path).close(FINISHED, None, [])
    again = part(tmp_path)
    again.evaluation(30, answers(9))
    assert "in 4 parts: accuracy 0.100 -> 0.900, mean lag 0.14" in _summary_line(again.close(FINISHED, None, []))


def test_no_summary_of_an_earlier_part_outlives_a_kill(tmp_path: Path) -> None:
    updates(first := part(tmp_path), 1, 3)
    first.close("Interrupted: stopped by SIGINT", None, [])
    assert said(tmp_path)["updates"] == 3
    updates(killed := part(tmp_path), 4, 5)
    killed._file.close()
    assert not (tmp_path / SUMMARY).exists()


def engine(name: str, tokens: int, lived_s: float) -> EngineReport:
    return EngineReport(
        actor=name,
        version=30,
        tokens=tokens,
        trajectories=1,
        busy_s=lived_s / 4,
        idle_s=lived_s * 3 / 4,
        swaps=5,
        swap_s=0.01,
        push_ms=0.0,
        checksum="abc",
    )


def test_what_only_engines_know_is_told_of_those_at_the_end_and_over_their_own_time(tmp_path: Path) -> None:
    """One of them has come late; the run is older than both."""
    engines = [engine("rollout-1", 1000, 100.0), engine("rollout-4", 100, 10.0)]
    found = in_three_parts(tmp_path).close(FINISHED, None, engines)["engines"]
    assert [one["actor"] for one in found["actors"]] == ["rollout-1", "rollout-4"]
    assert (found["tokens"], found["seconds"], found["swaps"]) == (1100, 110, 10)
    assert found["tokens_per_s"] == pytest.approx(10 + 10)
    assert (found["idle_share"], found["swap_ms"]) == (0.75, pytest.approx(2.0))


def test_where_nobody_was_asked_nothing_is_said(tmp_path: Path) -> None:
    updates(record := part(tmp_path), 1, 3)
    found = record.close("RunError: a stall", None, [])
    assert found["engines"] is None
    assert {found[name] for name in ("trajectories", "dropped", "failed", "dead_letters", "mean_tokens")} == {None}


def test_a_line_that_was_cut_is_ignored_by_replay_and_by_readers(tmp_path: Path) -> None:
    updates(record := part(tmp_path), 1, 2)
    record._file.close()
    with (tmp_path / lines.METRICS).open("a") as file:
        file.write('{"update": 3, "wall_s": 1')
    assert [line["update"] for line in lines.updates(tmp_path)] == [1, 2]
    first, second, third = rerun._curves(tmp_path, [report(1), report(2), report(3)])
    assert (first["recorded"]["update"], second["recorded"]["update"], third["recorded"]) == (1, 2, None)


def test_a_run_without_lines_has_none(tmp_path: Path) -> None:
    assert lines.read(tmp_path) == []


@pytest.mark.parametrize("damage", ["{\x00\x00\x00", '{"update": 2', "\udcff"])
def test_a_line_in_which_something_else_stands_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / lines.METRICS).write_text(f'{{"part": 1, "wall_s": 0}}\n{damage}\n', errors="surrogateescape")
    with pytest.raises(RunError, match=r"metrics.jsonl: line 2 is damaged: "):
        part(tmp_path)
