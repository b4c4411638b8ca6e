"""Rollout actors and ranks that live and give no sign of life."""

from collections.abc import Callable

import pytest
from driver_case import Case, id_of

from streamppo.errors import LearnerLost

Make = Callable[..., Case]
ASKED = "queue.silent(['rollout-0', 'rollout-1'], 40.0)"
WITH_RANK = f"queue.silent(['rollout-0', 'rollout-1', '{id_of('learner-0.0')}'], 40.0)"


def after(run: Case, seconds: float) -> list[str]:
    """The calls under way when the driver looks after so many seconds."""
    run.ray.now += seconds
    run.tick()
    return run.watched("silent")


def test_silent_actors_are_replaced_and_the_queue_is_asked_four_times_within_the_limit(driver_case: Make) -> None:
    run = driver_case(2, "watchdog.heartbeat_s=40")
    assert after(run, 9) == []
    assert after(run, 1) == [ASKED]
    run.answer(ASKED, ["rollout-1"])
    assert run.names() == ["rollout-0", "rollout-2"]
    assert run.record.restarts == [("rollout", "rollout-1: silent for more than 40 s")]


def test_a_rank_that_is_silent_is_a_lost_learner_from_the_moment_it_has_loaded(driver_case: Make) -> None:
    run = driver_case(2, "watchdog.heartbeat_s=40")
    assert after(run, 10) == [ASKED]
    run.answer(ASKED, [])
    run.with_model()
    assert after(run, 10) == [WITH_RANK]
    with pytest.raises(LearnerLost, match=r"^learner-0: silent for more than 40 s$"):
        run.answer(WITH_RANK, [id_of("learner-0.0")])


def test_ranks_that_are_gone_and_ranks_that_load_are_not_asked_about(driver_case: Make) -> None:
    run = driver_case(2, "watchdog.heartbeat_s=40").with_model()
    run.ray.now += 10
    run.with_model()
    assert run.watched("silent") == [ASKED]


def test_actors_and_ranks_that_were_replaced_already_are_nobodys_loss(driver_case: Make) -> None:
    run = driver_case(2, "watchdog.heartbeat_s=40").with_model()
    assert after(run, 10) == [WITH_RANK]
    run.with_model()
    run.rollouts.replace(id_of("rollout-1"), "it was killed")
    run.answer(WITH_RANK, ["rollout-1", id_of("learner-0.0")])
    assert run.names() == ["rollout-0", "rollout-2"]
    assert [stage for stage, _ in run.record.restarts] == ["rollout"]


def test_the_silence_of_a_queue_that_was_stopped_itself_is_that_of_nobody(driver_case: Make) -> None:
    run = driver_case(2, "watchdog.heartbeat_s=40").with_model()
    assert after(run, 10) == [WITH_RANK]
    run.answer(WITH_RANK, [])
    assert after(run, 10) == [WITH_RANK]
    for _ in range(7):
        assert after(run, 9) == [WITH_RANK], "one call waits: of several the newest would be in time"
    run.answer(WITH_RANK, ["rollout-0", "rollout-1", id_of("learner-0.0")])
    assert run.names() == ["rollout-0", "rollout-1"]
    assert run.record.restarts == []
    assert after(run, 0) == [WITH_RANK], "it is asked again"


@pytest.mark.parametrize("stopped_s", [11, 40, 3600])
def test_after_a_stop_of_the_driver_and_all_others_actors_get_time_to_call_again(
    driver_case: Make, stopped_s: float
) -> None:
    """As by Ctrl-Z and fg: the queue has no heartbeats of that time, and would call every actor silent."""
    run = driver_case(2, "watchdog.heartbeat_s=40").with_model()
    assert after(run, 9) == []
    assert after(run, stopped_s) == []
    assert after(run, 9) == []
    assert after(run, 1) == [WITH_RANK]
