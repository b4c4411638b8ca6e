"""Held-out prompts are asked for in parts: of which actors, and again when one leaves."""

from collections.abc import Callable
from typing import Any

import pytest
from driver_case import Case, id_of

from streamppo.driver import evaluation
from streamppo.driver.evaluation import evaluate
from streamppo.errors import RunError
from streamppo.types import EvaluationReport, encode

Make = Callable[..., Case]


def ask(run: Case, version: int) -> list[Any]:
    """Ask for an evaluation; the list is filled when all parts are there."""
    done: list[Any] = []
    evaluate(run.calls, run.crew, run.stages.config.evaluation.prompts, version, done.append)
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
    run.crew.replace(id_of("rollout-0"), "it was killed")
    assert run.names() == ["rollout-1", "rollout-2"]
    run.scale(3)
    run.die("rollout-0")
    assert run.watched("evaluate") == ["rollout-1.evaluate(1, 2, 5)", "rollout-1.evaluate(0, 2, 5)"]


def test_held_out_prompts_that_are_answered_are_progress(driver_case: Make) -> None:
    run = driver_case(2, "evaluation.prompts=3").with_model()
    done = ask(run, 5)
    assert run.watched("evaluate") == [f"rollout-{who}.evaluate({part}, 3, 5)" for part, who in enumerate((0, 1, 0))]
    run.ray.now += 200
    run.answer("rollout-0.evaluate(0, 3, 5)", report("rollout-0"))
    run.ray.now += 200
    run.tick("evaluation")
    run.ray.now += 200
    with pytest.raises(RunError, match="progressed for 300 s: the driver waits for evaluation"):
        run.tick("evaluation")
    assert done == []


def test_there_are_never_more_parts_than_actors_or_a_fixed_number(driver_case: Make) -> None:
    run = driver_case(1, "evaluation.prompts=1000000")
    ask(run, 5)
    assert len(run.watched("evaluate")) == evaluation.PARTS
