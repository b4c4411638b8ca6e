"""Rollout actors come and go: their names, the queue's part, the restarts that count."""

from collections.abc import Callable

import pytest
from driver_case import Case, id_of

from streamppo.errors import RunError

Make = Callable[..., Case]


def test_no_name_comes_twice_and_the_newest_go_first(driver_case: Make) -> None:
    run = driver_case(2)
    run.scale(4)
    assert run.names() == ["rollout-0", "rollout-1", "rollout-2", "rollout-3"]
    run.rollouts.replace(id_of("rollout-1"), "it was killed")
    assert run.names() == ["rollout-0", "rollout-2", "rollout-3", "rollout-4"]
    run.scale(2)
    assert run.names() == ["rollout-0", "rollout-2"]
    assert run.ray.killed == ["rollout-1", "rollout-3", "rollout-4"]
    run.scale(3)
    assert run.names() == ["rollout-0", "rollout-2", "rollout-5"]
    assert run.record.restarts == [("rollout", "rollout-1: it was killed")], "to be added or let go is not a restart"


def test_the_first_free_place_is_taken_again(driver_case: Make) -> None:
    run = driver_case(3)
    run.rollouts.replace(id_of("rollout-1"), "it was killed")
    assert [(handle.name, handle.place) for handle in run.rollouts.handles] == [
        ("rollout-0", 0),
        ("rollout-2", 2),
        ("rollout-3", 1),
    ]


def test_the_queue_takes_back_what_those_who_leave_were_sampling(driver_case: Make) -> None:
    run = driver_case(3)
    run.scale(1)
    assert run.watched("queue.lost") == ["queue.lost(rollout-1)", "queue.lost(rollout-2)"]
    assert run.watched(".run(") == ["rollout-0.run()"], "their end is nobody's failure"


def test_an_actor_whose_calls_all_fail_is_replaced_once(driver_case: Make) -> None:
    run = driver_case(2)
    run.stages.calls.watch("rollout-0.evaluate(0, 1, 5)", "evaluation", lambda value: None)
    run.die("rollout-0")
    assert run.names() == ["rollout-1", "rollout-2"]
    assert run.record.restarts == [("rollout", "rollout-0: RayActorError: rollout-0 has died")]
    assert run.watched("rollout-2") == ["rollout-2.start(" + str(run.folder / "model") + ")"]


def test_an_actor_that_stops_generating_ends_the_run(driver_case: Make) -> None:
    run = driver_case(1)
    with pytest.raises(RunError, match="rollout-0 stopped generating"):
        run.answer("rollout-0.run()", None)


def test_before_the_learner_has_pushed_weights_nobody_starts(driver_case: Make) -> None:
    run = driver_case(1)
    run.rollouts.generating = False
    run.rollouts.resize(2)
    assert run.watched("rollout-1") == []
    run.rollouts.generate()
    assert run.watched("rollout-1.start")
