"""The loop without Ray: the order of the mailbox, and updates that are redone, evaluated and recorded."""

import json
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_case import Case

from streamppo import loop
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import run_folder
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.errors import Interrupted, LearnerLost, RunError
from streamppo.learner.checkpoint import manifest
from streamppo.telemetry.record import RunRecord
from streamppo.types import UpdateReport, encode

Make = Callable[..., Case]


class Rank:
    """Handle of a rank that writes down its calls."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_: self._events.append(method))


class Loop:
    """`train` with answers to everything; `lose_at` are versions at which the learner dies, once each."""

    def __init__(self, run: Case, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.lose_at: list[int] = []
        self.interrupt_at = 0
        self.version = 0
        stages, record = run.stages, run.record
        stages.ranks = [Rank(self.events)]
        record.version, record.update, record.evaluation = 0, self.update, None
        patch.setattr(stages, "begin", lambda version: version)
        patch.setattr(stages, "start_learner", self.start)
        patch.setattr(stages, "reports", lambda: (None, []))
        patch.setattr(stages, "save_last", lambda folder: self.events.append("save last"))
        patch.setattr(stages, "finished_reports", lambda updates: [report(self.version + 1)])
        patch.setattr(stages.calls, "wait", self.wait)
        patch.setattr(
            stages.rollouts, "evaluate", lambda prompts, version, on_reports: self.events.append(f"eval {version}")
        )
        patch.setattr(manifest, "newest", lambda folder, at_most, past: self.newest(at_most))
        self.record = record

    def newest(self, at_most: int) -> Path | None:
        return Path(f"{at_most // 2 * 2:08d}") if at_most > 1 else None

    def start(self, checkpoint: Path | None) -> int:
        self.version = int(checkpoint.name) if checkpoint else 0
        self.events.append(f"start {self.version}")
        return self.version

    def wait(self, refs: Any, doing: str) -> list[Any]:
        if not doing.startswith("update"):
            return [b"digest" for _ in refs]
        if self.version + 1 in self.lose_at:
            self.lose_at.remove(self.version + 1)
            raise LearnerLost("learner-0 has died")
        if self.version + 1 == self.interrupt_at:
            raise Interrupted(signal.SIGINT)
        self.version += 1
        return [encode(report(self.version))]

    def update(self, made: UpdateReport) -> bool:
        fresh = made.version > self.record.version
        self.record.version = max(made.version, self.record.version)
        self.events.append(f"{'record' if fresh else 'redone'} {made.version}")
        return fresh


def report(version: int) -> UpdateReport:
    return UpdateReport(version=version, metrics={}, lag_histogram={})


@pytest.fixture
def looped(driver_case: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Case, Loop]]:
    def make(*overrides: str) -> tuple[Case, Loop]:
        run = driver_case(1, "updates=4", "checkpoint.every=2", "evaluation.every=3", *overrides)
        return run, Loop(run, monkeypatch)

    return make


END = ["save", "settle", "export", "eval 4"]


def test_one_update_more_is_always_in_the_mailbox_and_a_checkpoint_stands_behind_its_update(looped: Any) -> None:
    run, made = looped()
    loop.train(run.stages, run.record)
    assert made.events == [
        *["eval 0", "start 0", "update", "update", "save", "record 1", "update", "record 2", "update", "record 3"],
        *["eval 3", "record 4", *END],
    ]


def test_a_lost_learner_starts_again_from_the_newest_checkpoint_and_nothing_is_evaluated_twice(looped: Any) -> None:
    run, made = looped()
    made.lose_at = [4]
    loop.train(run.stages, run.record)
    assert made.events.count("eval 3") == 1
    assert made.events[made.events.index("start 2") :] == [
        *["start 2", "update", "update", "redone 3", "record 4", *END],
    ]
    assert run.record.restarts == [("learner", "learner-0 has died")]


def test_a_signal_saves_a_last_checkpoint_and_records_the_updates_that_were_made(looped: Any) -> None:
    run, made = looped()
    made.interrupt_at = 3
    with pytest.raises(Interrupted):
        loop.train(run.stages, run.record)
    assert made.events[-2:] == ["save last", "record 3"]


def test_a_run_that_has_all_its_updates_is_finished_once_more(looped: Any) -> None:
    run, made = looped()
    run.record.version = 4
    loop.train(run.stages, run.record)
    assert made.events == ["start 4", *END], "and evaluated once"


@pytest.mark.parametrize(("recorded", "begin"), [(0, 0), (3, 2), (5, 4), (7, 6)])
def test_a_resume_for_fewer_updates_than_were_made_ends_with_the_newest_version(
    looped: Any, monkeypatch: pytest.MonkeyPatch, recorded: int, begin: int
) -> None:
    """A kill may come many updates after the last checkpoint; the run is then told to end at an earlier update."""
    run, made = looped()
    run.record.version = recorded
    monkeypatch.setattr(run.stages, "begin", lambda version: 7)
    loop.train(run.stages, run.record)
    assert made.events[0] == f"start {begin}" and made.events.count("update") == 7 - begin
    assert made.events[-1] == "eval 7", "engines hold no older version, and would be waited for without end"


@pytest.mark.parametrize(("updates", "evaluations"), [(6, ["eval 6"]), (4, [])])
def test_a_version_that_was_evaluated_is_not_evaluated_again_by_a_resume(
    looped: Any, updates: int, evaluations: list[str]
) -> None:
    run, made = looped(f"updates={updates}")
    run.record.version, run.record.evaluated = 4, {0, 3, 4}
    loop.train(run.stages, run.record)
    assert [event for event in made.events if event.startswith("eval")] == evaluations


def test_a_new_folder_can_be_resumed_from_its_first_moment_and_takes_no_name_that_is_taken(
    math_config: Callable[..., Any], tmp_path: Path
) -> None:
    config = math_config()
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / "mine.txt").touch()
    (tmp_path / "math-2").touch()
    for name in ("math-3", "math-4"):
        made = loop.new_folder(config, tmp_path)
        assert made == tmp_path / name and configfile.load(made / configfile.CONFIG) == config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["math", "math-2", "math-3", "math-4"]


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_made(
    math_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MOUNTS", tmp_path / "mounts")
    run_folder.MOUNTS.write_text("27 1 254:0 / / rw - nfs4 server:/ rw")
    with pytest.raises(RunError, match="network file system"):
        loop.new_folder(math_config(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_summary_is_written_before_ray_is_ended_which_may_hang(
    math_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = loop.new_folder(math_config(), tmp_path)
    ended: list[Path] = []
    monkeypatch.setattr(loop.database, "merge_logs", ended.append)

    @contextmanager
    def session(config: Config, interrupts: Interrupts) -> Generator[None]:
        try:
            yield
        finally:
            assert not ended, "its processes still write"
            assert json.loads((folder / "summary.json").read_text())["outcome"] == "RunError: Ray has died"

    def fail(*_: object) -> None:
        raise RunError("Ray has died")

    monkeypatch.setattr(loop, "ray_session", session)
    monkeypatch.setattr(loop, "Stages", fail)
    interrupts: Any = SimpleNamespace(run=None)
    with pytest.raises(RunError, match=r"^Ray has died$"):
        loop.run(math_config(), folder, started=0.0, interrupts=interrupts)
    assert interrupts.run == folder and ended == [folder]


def test_metrics_that_were_deleted_while_the_run_went_on_do_not_keep_it_from_ending(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, 0.0, seed=1, updates=3)
    (tmp_path / "metrics.jsonl").unlink()
    assert record.close("finished", None, [])["updates"] == 0
