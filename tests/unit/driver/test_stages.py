"""Rollout actors come and go: who is asked, who is let go, what the queue is told. Ray is not there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import cluster, stages
from streamppo.driver import lock as running
from streamppo.driver.stages import Stages
from streamppo.errors import RunError
from streamppo.types import EvaluationReport, encode


class Answers:
    """The values of calls; what is not there is an actor that has died."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def get(self, ref: str, timeout: float | None = None) -> Any:
        if ref not in self.values:
            raise RayActorError(error_msg=f"{ref} has died")
        return self.values[ref]


class Method:
    """A remote method: its references tell who was asked what."""

    def __init__(self, who: str, what: str) -> None:
        self._of = f"{who}.{what}"

    def remote(self, *arguments: Any) -> str:
        return f"{self._of}({', '.join(map(str, arguments))})"


class Actor:
    def __init__(self, name: str) -> None:
        self._name = name
        self._actor_id = self

    def hex(self) -> str:
        return f"id of {self._name}"

    def __getattr__(self, what: str) -> Method:
        return Method(self._name, what)


class Told:
    """A record that writes nothing: what the terminal and metrics.jsonl would have."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.restarts: list[tuple[str, str]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def restart(self, stage: str, reason: str) -> None:
        self.restarts.append((stage, reason))


class Case:
    """`Stages` that flow, with `actors` at work."""

    def __init__(self, config: Config, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.told = Told()
        self.killed: list[str] = []
        self.answers = Answers()
        patch.setattr(stages.ray, "get", self.answers.get)
        patch.setattr(stages.ray, "kill", lambda actor: self.killed.append(actor._name))
        patch.setattr(Stages, "_rollout", lambda _, name, place: Actor(name))
        told: Any = self.told
        patch.setattr(stages.ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
        nothing: Any = None
        self.folder = folder
        self.stages: Any = Stages(config, folder, told, nothing)
        self.stages.queue = Actor("queue")
        self.stages._placement = type("Placement", (), {"waiting": staticmethod(str)})
        self.stages.learner = type("Group", (), {"ranks": []})
        self.stages._flowing = True
        for _ in range(config.rollout.actors):
            self.stages._generate(self.stages._crew.hire())
        self.start_all()

    def start_all(self) -> None:
        for name in self.names():
            if (ref := f"{name}.start({self.stages._model_path})") in self.stages._watched:
                self.settle(ref, 0)

    def settle(self, ref: str, *value: Any) -> None:
        """`ref` has this value, or its actor has died."""
        self.answers.values |= dict.fromkeys([ref], *value) if value else {}
        self.stages._settle(ref, "a test", [])

    def scale(self, wanted: int) -> None:
        with running.held(self.folder), pytest.raises(RunError, match="no answer"):
            running.scale(self.folder, wanted, within_s=0)
        self.stages._check_scale()

    def names(self) -> list[str]:
        return [seat.name for seat in self.stages._crew.seats]

    def watched(self, part: str) -> list[str]:
        return [ref for ref in self.stages._watched if part in ref]


@pytest.fixture
def case(math_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    def make(actors: int, *overrides: str) -> Case:
        config = math_config(f"rollout.actors={actors}", "evaluation.prompts=1", *overrides)
        return Case(config, tmp_path, monkeypatch)

    return make


def test_no_name_comes_twice_and_the_newest_go_first(case: Callable[..., Case]) -> None:
    run = case(2)
    run.scale(4)
    assert run.names() == ["rollout-0", "rollout-1", "rollout-2", "rollout-3"]
    run.stages._replace("id of rollout-1", "it was killed")
    assert run.names() == ["rollout-0", "rollout-2", "rollout-3", "rollout-4"]
    run.scale(2)
    assert run.names() == ["rollout-0", "rollout-2"]
    assert run.killed == ["rollout-1", "rollout-3", "rollout-4"]
    run.scale(3)
    assert run.names() == ["rollout-0", "rollout-2", "rollout-5"]
    assert run.told.restarts == [("rollout", "rollout-1: it was killed")], "to be added or let go is no restart"


def test_the_queue_takes_back_what_those_who_leave_were_sampling(case: Callable[..., Case]) -> None:
    run = case(3)
    run.scale(1)
    assert run.watched("queue.lost") == ["queue.lost(rollout-1)", "queue.lost(rollout-2)"]
    assert run.watched(".run(") == ["rollout-0.run()"], "their end is nobody's failure"


def test_a_number_that_was_taken_over_is_that_of_the_runs_configuration(case: Callable[..., Case]) -> None:
    run = case(1)
    run.scale(3)
    assert configfile.load(run.folder / configfile.CONFIG).rollout.actors == 3
    assert run.stages.config.rollout.actors == 3
    assert not (run.folder / running.TAKEN).exists()


def test_a_request_that_is_none_changes_nothing(case: Callable[..., Case]) -> None:
    run = case(2)
    (run.folder / running.SCALE).write_text("three")
    run.stages._check_scale()
    assert run.names() == ["rollout-0", "rollout-1"]
    assert "rollout actors: 2 stay" in run.told.said[0] and "scale.json" in run.told.said[0]
    assert not (run.folder / running.TAKEN).exists()


FORBIDDEN = {
    "are more than one GPU": ["learner.gpus=0.5", "rollout.gpus=0.5"],
    "must be 1 with rollout.engine.url": ["rollout.engine={kind='sglang', url='http://localhost:1'}"],
    "asks for 3 CPUs (there are 2)": ["cluster.cpus=2"],
    "asks for 2 GPUs (there are 1)": ["rollout.gpus=1"],
}


@pytest.mark.parametrize("reason", FORBIDDEN)
def test_a_number_that_no_run_may_have_is_refused_and_the_run_goes_on(case: Callable[..., Case], reason: str) -> None:
    run = case(1, *FORBIDDEN[reason])
    configfile.save(run.stages.config, run.folder)
    run.scale(2)
    assert run.names() == ["rollout-0"]
    assert run.told.said[0].startswith("rollout actors: 1 stay: ") and reason in run.told.said[0]
    assert run.stages.config.rollout.actors == configfile.load(run.folder / configfile.CONFIG).rollout.actors == 1
    assert not (run.folder / running.TAKEN).exists(), "whoever asked waits for an answer"


@pytest.mark.parametrize("overrides", [[], ["cluster.address=auto", "cluster.cpus=2", "rollout.gpus=1"]])
def test_cpus_that_nobody_has_counted_and_clusters_that_may_grow_refuse_nobody(
    case: Callable[..., Case], overrides: list[str]
) -> None:
    run = case(1, *overrides)
    run.scale(9)
    assert len(run.names()) == 9


def test_before_the_flow_nobody_is_added(case: Callable[..., Case]) -> None:
    run = case(1)
    run.stages._flowing = False
    run.scale(3)
    assert run.names() == ["rollout-0"]
    run.stages._flowing = True
    run.stages._check_scale()
    assert len(run.names()) == 3


def test_whoever_starts_is_not_asked_for_anything(case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    run = case(1)
    run.scale(3)
    run.stages.evaluate(5, lambda parts: None)
    assert run.watched("evaluate") == ["rollout-0.evaluate(0, 1, 5)"]
    run.stages._asked -= 1000
    run.stages._check_silence()
    assert run.watched("silent") == ["queue.silent(['rollout-0'], 60.0)"]
    monkeypatch.setattr(run.stages, "drain", lambda name: None)
    monkeypatch.setattr(run.stages, "wait", lambda refs, doing: [b""])
    monkeypatch.setattr(stages, "decode", lambda data, kind: data)
    run.stages.reports()
    assert run.watched("report") == ["rollout-0.report()"]
    run.start_all()
    run.stages.evaluate(6, lambda parts: None)
    assert len(run.watched(", 3, 6)")) == 3


def test_an_evaluation_that_is_under_way_is_ended_by_those_who_stay(case: Callable[..., Case]) -> None:
    run, made = case(3), []
    run.stages.evaluate(5, made.append)
    run.scale(1)
    run.settle("rollout-0.evaluate(0, 3, 5)", answer("rollout-0"))
    for part in (1, 2):
        run.settle(f"rollout-{part}.evaluate({part}, 3, 5)")
        assert made == []
        run.settle(f"rollout-0.evaluate({part}, 3, 5)", answer("rollout-0"))
    assert [part.count for part in made[0]] == [7, 7, 7]
    assert run.told.restarts == []


def test_the_share_of_one_that_dies_is_asked_of_one_that_is_at_work(case: Callable[..., Case]) -> None:
    run = case(2)
    run.stages.evaluate(5, lambda parts: None)
    run.stages._replace("id of rollout-0", "it was killed")
    assert run.names() == ["rollout-1", "rollout-2"]
    run.scale(3)
    run.settle("rollout-0.evaluate(0, 2, 5)")
    run.settle("rollout-1.evaluate(1, 2, 5)")
    assert run.watched("evaluate") == ["rollout-1.evaluate(0, 2, 5)", "rollout-1.evaluate(1, 2, 5)"]


def answer(name: str) -> bytes:
    return encode(EvaluationReport(actor=name, correct=1, count=7, failed=0, min_version=5, max_version=5))


def test_what_goes_by_hashes_is_the_same_in_every_process(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("PYTHONPATH", "")
    seeds: list[str] = []
    monkeypatch.setattr(cluster.ray, "init", lambda **options: seeds.append(os.environ["PYTHONHASHSEED"]))
    cluster.init_ray(math_config())
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    cluster.init_ray(math_config())
    assert seeds == ["0", "7"]


def test_held_out_prompts_that_are_answered_are_progress(case: Callable[..., Case]) -> None:
    run, made = case(2, "evaluation.prompts=3"), []
    run.stages.evaluate(5, made.append)
    assert run.watched("evaluate") == [f"rollout-{who}.evaluate({part}, 3, 5)" for part, who in enumerate((0, 1, 0))]
    run.stages._progress -= 200
    run.settle("rollout-0.evaluate(0, 3, 5)", answer("rollout-0"))
    run.stages._progress -= 200
    run.stages._check_stall("evaluation")
    run.stages._progress -= 200
    with pytest.raises(RunError, match="progressed for 300 s: the driver waits for evaluation"):
        run.stages._check_stall("evaluation")
    assert made == []
    many = case(1, "evaluation.prompts=1000000")
    many.stages.evaluate(5, made.append)
    assert len(many.watched("evaluate")) == stages.PARTS


def test_an_engine_may_take_as_long_to_start_as_its_configuration_says(case: Callable[..., Case]) -> None:
    run = case(2, "rollout.engine={kind='sglang', start_s=500}")
    for seat in run.stages._crew.seats:
        seat.at_work = False
    run.stages._progress -= 700
    run.stages._check_stall("update 1")
    run.stages._flowing = False
    with pytest.raises(RunError, match="progressed for 300 s"):
        run.stages._check_stall("loading the model")
    run.stages._flowing = True
    run.stages._progress -= 200
    with pytest.raises(RunError, match=r"progressed for 800 s.*have not started: rollout-0, rollout-1"):
        run.stages._check_stall("update 1")
    run.stages._generate(run.stages._crew.seats[0])
    run.start_all()
    run.stages._check_stall("update 1")
    run.stages._progress -= 400
    with pytest.raises(RunError, match=r"progressed for 300 s.*have not started: rollout-1"):
        run.stages._check_stall("update 1")
