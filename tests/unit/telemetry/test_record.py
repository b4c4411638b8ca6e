"""What is said of a whole run: over any number of parts, however each of them ended."""

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live_states
import pytest
from msgspec import structs

from streamppo import durable
from streamppo.commands import replay as rerun
from streamppo.config.sections import Config
from streamppo.errors import RunError
from streamppo.process import PhaseTime
from streamppo.tasks.rewards.outcome import LARGEST
from streamppo.telemetry import metrics_file as lines
from streamppo.telemetry import record as record_module
from streamppo.telemetry.catalogue import BESIDE, LINES, UPDATE
from streamppo.telemetry.diagnosis import Diagnosis
from streamppo.telemetry.evidence import WINDOW
from streamppo.telemetry.live.display import PlainLines
from streamppo.telemetry.live.view import view
from streamppo.telemetry.metrics_file import FINISHED
from streamppo.telemetry.record import SUMMARY, RunRecord
from streamppo.telemetry.summary import final_line
from streamppo.types import EngineReport, EvaluationReport, QueueReport, Sample, UpdateReport

METRICS = {
    "entropy": 1.0,
    "ess": 1.0,
    "lag_mean": 0.0,
    "update_s": 2.0,
    "push_ms": 3.0,
    "tokens_trained": 10.0,
    "tokens_too_old": 0.0,
}


def report(version: int) -> UpdateReport:
    metrics = {**METRICS, "reward": version / 100, "wait_s": 0.5 if version > 20 else 0.0}
    return UpdateReport(version=version, metrics=metrics, lag_histogram={0: 9, version % 3: 1})


def answers(correct: int) -> list[EvaluationReport]:
    return [EvaluationReport(actor="rollout-0", correct=correct, count=10, failed=0, min_version=0, max_version=0)]


def part(folder: Path, lasting_s: float = 0.0) -> RunRecord:
    """A part of a run whose command began so long ago."""
    return RunRecord(folder, time.perf_counter() - lasting_s, seed=1, updates=30)


def updates(record: RunRecord, first: int, last: int) -> None:
    for version in range(first, last + 1):
        record.update(report(version))


def of_queue(**phases: PhaseTime) -> QueueReport:
    counts = dict.fromkeys(("issued", "stored", "consumed", "duplicates", "dead_letters", "masked_tokens"), 0)
    means = {"mean_tokens_consumed": 0.0, "mean_tokens_dropped": 0.0}
    named = {"dropped": {}, "failed": {}, "tokens": {}, "phases": phases}
    return QueueReport(version=1, ready=5, in_flight=7, **named, **counts, **means)


def of_engine() -> EngineReport:
    sample = Sample(prompt="1+1=", completion="2", reward=1.0, version=3)
    counts = {"version": 4, "tokens": 10, "trajectories": 2, "swaps": 0, "prompted": 8, "reused": 6}
    counts |= {"context": 10, "context_reused": 9}
    seconds = {"busy_s": 1.0, "idle_s": 0.5, "swap_s": 0.0, "push_ms": 0.0}
    named = {"kv_ages": {0: 3, 2: 3, 5: 0}, "agents": {"requests": 3, "runs": 2}}
    return EngineReport(actor="rollout-0", checksum="", sample=sample, **counts, **seconds, **named)


def tell(record: RunRecord, after_s: float, *reports: QueueReport | EngineReport) -> None:
    """Reports that come so long after the record was made."""
    present = record._began + after_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_module.time, "monotonic", lambda: present)
        for one in reports:
            record.queue(one) if isinstance(one, QueueReport) else record.engine(one)


def said(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SUMMARY).read_text())


def in_three_parts(folder: Path) -> RunRecord:
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


def test_updates_with_the_metrics_of_every_update_alone_are_shown(tmp_path: Path) -> None:
    record = part(tmp_path)
    shown: list[str] = []
    record.display.update = lambda text, **_: shown.append(text)  # pyright: ignore[reportAttributeAccessIssue]
    for version in range(1, 31):
        record.update(UpdateReport(version=version, metrics=dict.fromkeys(UPDATE, 1.0), lag_histogram={0: 10}))
    assert len(shown) == 30 and "reward -  entropy -  ess 1.000" in shown[0]
    state = live_states.empty()
    for line in lines.content(tmp_path).lines:
        state.add(line)
    assert any("30/100" in row.plain for row in view(state, 80, 24))
    record.close(FINISHED, None, [])
    assert said(tmp_path)["updates"] == 30


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


@pytest.mark.parametrize("newest", [2, 3, 5])
def test_the_line_of_an_update_that_was_not_published_is_replaced(newest: int, tmp_path: Path) -> None:
    """It may be made again under another configuration."""
    killed = part(tmp_path)
    updates(killed, 1, 3)
    killed.close("killed", None, ())
    record = part(tmp_path, lasting_s=5.0)
    record.drop_unpublished(newest)
    again = report(3)
    assert record.update(structs.replace(again, metrics={**again.metrics, "entropy": 7.0})) is (newest < 3)
    record.close("killed", None, ())
    entropies = {line["update"]: line["entropy"] for line in lines.read(tmp_path) if "update" in line}  # pyright: ignore
    assert entropies == {1: 1.0, 2: 1.0, 3: 7.0 if newest < 3 else 1.0}
    assert sum("part" in line for line in lines.read(tmp_path)) == 2


def test_a_disk_that_refuses_to_drop_a_line_is_named_and_the_end_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    record = part(tmp_path)
    record.update(report(1))
    with monkeypatch.context() as full, pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written: .*No space"):
        full.setattr(durable, "write", refuse)
        record.drop_unpublished(0)
    record.close("RunError: a full disk", None, ())
    assert lines.read(tmp_path)[-1]["end"] == "RunError: a full disk"  # pyright: ignore


def test_every_kind_of_line_is_in_the_catalogue(tmp_path: Path) -> None:
    whole = in_three_parts(tmp_path)
    whole.remade(5, METRICS | {"reward": 1.0}, {0: 1})
    tell(whole, 100.0, of_queue(), of_engine())
    whole.close(FINISHED, None, [])
    assert {next(iter(line)) for line in lines.read(tmp_path)} == LINES.keys()
    assert all(line.keys() == BESIDE.keys() | report(1).metrics.keys() for line in lines.updates(tmp_path))


def test_the_newest_phases_of_every_process_are_in_the_summary(tmp_path: Path) -> None:
    record = part(tmp_path)
    tell(record, 10.0, of_queue(process=PhaseTime(1, 9.0, 3.0), journal=PhaseTime(7, 2.0, 1.0)))
    tell(record, 20.0, of_queue(process=PhaseTime(1, 19.0, 6.0), journal=PhaseTime(8, 3.0, 1.5)))
    record.update(structs.replace(report(30), phases={"pack": PhaseTime(1, 0.5, 0.4)}))
    record.close(FINISHED, None, [])
    queue = {"process": [1, 19.0, 6.0], "journal": [8, 3.0, 1.5]}
    assert said(tmp_path)["phases"] == {"queue": queue, "learner-0": {"pack": [1, 0.5, 0.4]}}


def test_reports_that_come_often_are_all_shown_and_written_down_now_and_then(tmp_path: Path) -> None:
    shown: list[lines.Line] = []
    display = PlainLines()
    display.line = shown.append
    record = RunRecord(tmp_path, time.perf_counter(), seed=1, updates=30, display=display)
    for second in range(1, 21):
        tell(record, float(second), of_queue(), of_engine())
    assert sum("queue" in line for line in shown) == sum("engine" in line for line in shown) == 20
    written = lines.read(tmp_path)
    assert sum("queue" in line for line in written) == sum("engine" in line for line in written) == 2
    assert sum("phases" in line for line in written) == 4
    newest = next(line for line in reversed(written) if "engine" in line)
    assert newest.get("prefix_reused") == 0.75 and newest.get("context_reused") == 0.9
    assert newest.get("kv_age") == 1.0 and newest.get("kv_ages") == {"0": 3, "2": 3}
    assert newest.get("agents") == {"requests": 3, "runs": 2}
    assert newest["sampled"] == {"prompt": "1+1=", "completion": "2", "reward": 1.0, "version": 3}
    record.close(FINISHED, None, [])


def test_the_last_line_is_about_the_whole_run(tmp_path: Path) -> None:
    line = final_line(in_three_parts(tmp_path).close(FINISHED, None, []))
    assert line.startswith("30 updates in 111")
    assert line.endswith(
        " s in 3 parts: accuracy 0.100 -> 0.900: better than at the start, "
        "lag of trained tokens 0.14 (max 2), learner idle 8%"
    )


def test_a_run_that_had_made_everything_already_has_its_last_line_too(tmp_path: Path) -> None:
    in_three_parts(tmp_path).close(FINISHED, None, [])
    again = part(tmp_path)
    again.evaluation(30, answers(9))
    assert "in 4 parts: accuracy 0.100 -> 0.900: better than at the start, lag of trained tokens 0.14" in final_line(
        again.close(FINISHED, None, [])
    )


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


def test_the_last_counters_of_the_engines_are_written_down_so_that_their_time_ends_with_the_run(tmp_path: Path) -> None:
    part(tmp_path).close(FINISHED, None, [engine("rollout-0", 700, 10.0)])
    *_, told, _, end = lines.read(tmp_path)
    assert (told.get("engine"), told.get("tokens"), end.get("end")) == ("rollout-0", 700, FINISHED)


def test_where_nobody_was_asked_nothing_is_said(tmp_path: Path) -> None:
    updates(record := part(tmp_path), 1, 3)
    found = record.close("RunError: a stall", None, [])
    assert found["engines"] is None
    assert {found[name] for name in ("trajectories", "dropped", "failed", "dead_letters", "mean_tokens", "tokens")} == {
        None
    }


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


def killed(folder: Path, made: int) -> None:
    """A part that makes so many updates and is killed."""
    updates(record := part(folder), 1, made)
    record._file.close()


DAMAGED = [
    "{\x00\x00\x00",
    '{"update": 2',
    "\udcff",
    '{"update": 2, "wall_s": 1}',
    '{"evaluation": "x", "wall_s": 1, "accuracy": 1, "count": 1, "failed": 0, "versions": [0, 0]}',
    "[" * 100_000,
    "[1]",
    '{"wall_s": 1}',
]


def test_the_largest_rewards_make_no_damaged_line(tmp_path: Path) -> None:
    record = part(tmp_path)
    for version, reward in enumerate((LARGEST, -LARGEST), 1):
        one = report(version)
        record.update(structs.replace(one, metrics={**one.metrics, "reward": reward}))
    record.close(FINISHED, None, [])
    assert not lines.content(tmp_path).damage


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_is_named_and_holds_nothing_back(
    tmp_path: Path, logged: pytest.LogCaptureFixture, damage: str
) -> None:
    killed(tmp_path, 3)
    before, last = (tmp_path / lines.METRICS).read_bytes().splitlines(keepends=True)[:-1], 3
    text = b"".join([before[0], damage.encode(errors="surrogateescape"), b"\n", *before[1:]])
    (tmp_path / lines.METRICS).write_bytes(text)
    again = part(tmp_path)
    assert "metrics.jsonl: line 2 is damaged: it is left out" in logged.text
    assert (again.version, again.complete_to) == (2, float("inf")), "no update is replayed for a lost line"
    again.begin(last)
    updates(again, 4, 30)
    again.close(FINISHED, None, [])
    assert said(tmp_path)["updates"] == 30
    assert [line["update"] for line in lines.updates(tmp_path)] == [1, 2, *range(4, 31)]


def test_lines_that_are_gone_are_no_error_before_a_part_or_in_it(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path, 3)
    (tmp_path / lines.METRICS).unlink()
    again = part(tmp_path)
    assert again.complete_to == float("inf")
    again.begin(3)
    assert again.version == again.complete_to == 3
    updates(again, 4, 5)
    (tmp_path / lines.METRICS).unlink()
    updates(again, 6, 7)
    assert "metrics.jsonl is gone: it was deleted with its lines so far" in logged.text
    again.close(FINISHED, None, [])
    assert [line["update"] for line in lines.updates(tmp_path)] == [6, 7]
    assert said(tmp_path)["wall_s"] > 0


def test_lines_in_a_folder_that_was_moved_are_not_said_to_be_lost(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    again = part(folder)
    again.begin(0)
    updates(again, 1, 2)
    folder.rename(tmp_path / "moved")
    # A process of the run makes it again, as for a checkpoint.
    folder.mkdir()
    updates(again, 3, 4)
    again.close(FINISHED, None, [])
    assert "metrics.jsonl is gone: it, or the run's folder, was moved with its lines so far" in logged.text
    found = [[line["update"] for line in lines.updates(one)] for one in (tmp_path / "moved", folder)]
    assert found == [[1, 2], [3, 4]]


def test_a_run_without_any_line_has_a_summary_all_the_same(tmp_path: Path) -> None:
    record = part(tmp_path)
    (tmp_path / lines.METRICS).write_text("damaged\n")
    assert "no held-out prompt has a score" in final_line(record.close(FINISHED, None, []))


# --- evaluations and lag -------------------------------------------------------------------------------------


def test_accuracies_go_by_version_and_not_by_the_order_in_which_they_ended(tmp_path: Path) -> None:
    record = part(tmp_path)
    for version, correct in ((20, 4), (0, 1), (30, 9), (10, 2)):
        record.evaluation(version, answers(correct))
    record.close(FINISHED, None, [])
    assert said(tmp_path)["evaluations"] == [[0, 0.1], [10, 0.2], [20, 0.4], [30, 0.9]]
    assert said(tmp_path)["eval_accuracy"] == {"start": 0.1, "final": 0.9}


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        (0, "the task has no held-out prompts"),
        (10, "all 10 held-out prompts failed, the first of them: reward: oops\n"),
    ],
)
def test_an_evaluation_without_a_score_says_why(
    tmp_path: Path, logged: pytest.LogCaptureFixture, failed: int, why: str
) -> None:
    record = part(tmp_path)
    none = EvaluationReport(actor="rollout-0", correct=0, count=0, failed=failed, min_version=0, max_version=0)
    record.evaluation(0, [structs.replace(none, reason="reward: oops\nat line 2") if failed else none])
    updates(record, 1, 2)
    assert f"version    0: no accuracy: {why}" in logged.text
    line = final_line(record.close(FINISHED, None, []))
    assert "nan" not in line + logged.text + (tmp_path / lines.METRICS).read_text() + (tmp_path / SUMMARY).read_text()
    assert ": no held-out prompt has a score, lag of" in line


def test_an_evaluation_with_failures_in_many_parts_is_one_line_with_the_first_reason(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    record = part(tmp_path)
    (whole,) = answers(4)
    failed = structs.replace(whole, correct=0, count=0, failed=3, reason="reward: oops")
    record.evaluation(7, [whole, failed, structs.replace(failed, reason="another"), whole])
    record.close(FINISHED, None, [])
    lines = [line for line in logged.messages if "held-out, " in line]
    assert len(lines) == 1
    assert lines[0].endswith(
        "version    7: accuracy 0.400 on 20 held-out, 6 without a score, the first of them: reward: oops"
    )


def test_tokens_beyond_the_bound_are_sampled_and_not_trained(tmp_path: Path) -> None:
    record = part(tmp_path)
    metrics = {**report(1).metrics, "tokens_too_old": 5.0}
    record.update(UpdateReport(version=1, metrics=metrics, lag_histogram={0: 90, 10: 1, 2: 6, 3: 3}))
    line = final_line(record.close(FINISHED, None, []))
    assert said(tmp_path)["lag"]["histogram"] == {"0": 90, "2": 6, "3": 3, "10": 1}
    assert said(tmp_path)["trained_lag"]["histogram"] == {"0": 90, "2": 5}
    assert "lag of trained tokens 0.11 (max 2), of sampled ones max 10," in line


def test_a_finding_is_logged_once_also_by_a_run_that_is_resumed(
    tmp_path: Path, math_config: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    def make(first: int, last: int) -> RunRecord:
        record = RunRecord(tmp_path, time.perf_counter(), seed=1, updates=100, diagnosis=Diagnosis(math_config()))
        for version in range(first, last + 1):
            made = report(version)
            record.update(structs.replace(made, metrics={**made.metrics, "ess": 0.1, "wait_s": 0.0}))
        return record

    make(1, 2 * WINDOW)._file.close()
    assert [one.getMessage().partition(": lower")[0] for one in caplog.records if one.levelname == "WARNING"] == [
        "ESS collapse: ess is at most 0.10 in a quarter of the updates: few of the tokens count"
    ]
    caplog.clear()
    resumed = make(2 * WINDOW + 1, 4 * WINDOW)
    assert [one for one in caplog.records if one.levelname == "WARNING"] == []
    assert resumed.diagnosis is not None and resumed.diagnosis.newest is not None
    assert resumed.diagnosis.newest.last == 4 * WINDOW
    resumed._file.close()


def test_the_summary_puts_what_actors_have_reused_together_by_tokens(tmp_path: Path) -> None:
    other = structs.replace(of_engine(), prompted=92, reused=4, context=0, context_reused=0, kv_ages={1: 4}, agents={})
    summary = part(tmp_path).close(FINISHED, None, [of_engine(), other])
    assert summary["engines"] is not None
    told = {name: summary["engines"].get(name) for name in ("prefix_reused", "context_reused", "kv_age", "kv_ages")}
    assert told == {"prefix_reused": 0.1, "context_reused": 0.9, "kv_age": 1.0, "kv_ages": {"0": 3, "1": 4, "2": 3}}
    read_back = record_module.read_summary(tmp_path)
    assert read_back is not None and read_back["engines"] == summary["engines"]
    none = structs.replace(other, prompted=0, reused=0, kv_ages={})
    bare = part(tmp_path).close(FINISHED, None, [none])["engines"]
    assert bare is not None and not {"prefix_reused", "context_reused", "kv_age", "kv_ages"} & bare.keys()
