"""Held-out prompts are asked for in parts: of which actors, and again when one leaves."""

from collections.abc import Callable
from typing import Any

import pytest
from driver_case import Case, id_of

from streamppo import loop
from streamppo.driver.watch.rollout_pool import PARTS
from streamppo.errors import RunError
from streamppo.types import EvaluationReport, encode

Make = Callable[..., Case]


def ask(run: Case, version: int) -> list[Any]:
    """Ask for an evaluation; the list is filled when all parts are there."""
    done: list[Any] = []
    run.rollouts.evaluate(run.stages.config.evaluation.prompts, version, done.append)
    return done


def report(name: str) -> bytes:
    return encode(EvaluationReport(actor=name, correct=1, count=7, failed=0, min_version=5, max_version=5))


def test_an_actor_that_starts_is_not_asked(driver_case: Make) -> None:
    run = driver_case(1)
    run.scale(3)
    ask(run, 5)
    assert run.watched("evaluate") == ["rollout-0.evaluate(0, 1, 5)"]
    run.load_all()
    ask(run, 6)
    assert len(run.watched(", 3, 6)")) == 3


def test_an_evaluation_that_is_under_way_is_ended_by_those_who_stay(driver_case: Make) -> None:
    run = driver_case(3)
    done = ask(run, 5)
    run.scale(1)
    run.answer("rollout-0.evaluate(0, 3, 5)", report("rollout-0"))
    for part in (1, 2):
        run.die(f"rollout-{part}")
        assert done == []
        run.answer(f"rollout-0.evaluate({part}, 3, 5)", report("rollout-0"))
    assert [part.count for part in done[0]] == [7, 7, 7]
    assert run.record.restarts == []


def test_the_part_of_an_actor_that_dies_is_asked_of_one_that_is_at_work(driver_case: Make) -> None:
    run = driver_case(2)
    ask(run, 5)
    run.rollouts.replace(id_of("rollout-0"), "it was killed")
    assert run.names() == ["rollout-1", "rollout-2"]
    run.scale(3)
    run.die("rollout-0")
    assert run.watched("evaluate") == ["rollout-1.evaluate(1, 2, 5)", "rollout-1.evaluate(0, 2, 5)"]


def test_held_out_prompts_that_are_answered_are_progress(driver_case: Make) -> None:
    run = driver_case(2, "evaluation.prompts=3").with_model()
    done = ask(run, 5)
    assert run.watched("evaluate") == [f"rollout-{who}.evaluate({part}, 3, 5)" for part, who in enumerate((0, 1, 0))]
    run.wait(290, "evaluation")
    run.answer("rollout-0.evaluate(0, 3, 5)", report("rollout-0"))
    run.wait(290, "evaluation")
    with pytest.raises(RunError, match="no progress for 300 s: the driver waits for evaluation"):
        run.wait(20, "evaluation")
    assert done == []


def test_there_are_never_more_parts_than_actors_or_a_fixed_number(driver_case: Make) -> None:
    run = driver_case(1, "evaluation.prompts=1000000")
    ask(run, 5)
    assert len(run.watched("evaluate")) == PARTS


def test_actors_of_its_own_answer_and_sample_nothing(driver_case: Make) -> None:
    run = driver_case(2, "evaluation.actors=1")
    assert run.watched("evaluation-0") == ["evaluation-0.follow()"]
    loop._evaluate(run.stages, run.record, 5)
    assert {ref.split(".")[0] for ref in run.watched("evaluate")} == {"evaluation-0"}
    assert run.names() == ["rollout-0", "rollout-1"]


def test_one_that_dies_is_replaced_and_its_parts_are_asked_of_the_next(driver_case: Make) -> None:
    run = driver_case(1, "evaluation.actors=1", "evaluation.prompts=1")
    loop._evaluate(run.stages, run.record, 5)
    run.die("evaluation-0")
    assert run.record.restarts == [("rollout", "evaluation-0: RayActorError: evaluation-0 has died")]
    run.load_all()
    assert set(run.watched("evaluation-1")) == {"evaluation-1.evaluate(0, 1, 5)", "evaluation-1.follow()"}
    run.stages._replace_silent("evaluation-1", "silent for more than 60 s")
    assert [handle.name for handle in run.stages.evaluators.handles] == ["evaluation-2"] and run.names() == [
        "rollout-0"
    ]


def test_more_rollout_actors_take_nothing_from_it(driver_case: Make) -> None:
    run = driver_case(1, "evaluation.actors=1")
    run.scale(3)
    assert [handle.name for handle in run.stages.evaluators.handles] == ["evaluation-0"]
    run.scale(1)
    assert run.ray.killed == ["rollout-1", "rollout-2"]
