"""Awaited calls, and calls that are watched meanwhile."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from driver_case import Case, FakeRay
from ray.exceptions import RayTaskError

from streamppo.driver.watch.polling import ReportPolling
from streamppo.driver.watch.rollout_pool import RolloutHandle
from streamppo.driver.watch.watch import TICK_S, RunStage, WatchedCalls
from streamppo.errors import JournalError, LearnerLost, RunError
from streamppo.types import EngineReport, encode


@pytest.fixture
def calls(fake: FakeRay) -> Any:
    return WatchedCalls(lambda name, error: None, lambda doing: None)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


def failed(message: str) -> RayTaskError:
    return RayTaskError("method", "trace", JournalError(message))


def test_the_values_come_in_the_order_of_the_calls_and_watched_calls_are_handled_meanwhile(
    calls: Any, fake: FakeRay
) -> None:
    seen: list[int] = []
    calls.watch("b.watched()", RunStage.REPORT, seen.append)
    fake.values |= {"a.second()": 2, "a.first()": 1, "b.watched()": 3}
    assert calls.wait(["a.first()", "a.second()"], "two") == [1, 2]
    calls.drain(RunStage.REPORT)
    assert seen == [3]


def test_a_call_that_is_both_watched_and_waited_for_is_handled_once(calls: Any, fake: FakeRay) -> None:
    seen: list[int] = []
    calls.watch("a.first()", RunStage.REPORT, seen.append)
    fake.values["a.first()"] = 1
    assert calls.wait(["a.first()"], "one") == [1]
    assert seen == [1]


def test_draining_waits_for_its_stage_alone(calls: Any, fake: FakeRay) -> None:
    calls.watch_all(["a.saved()"], RunStage.CHECKPOINT)
    calls.watch_all(["b.report()"], RunStage.REPORT)
    fake.values["b.report()"] = 1
    calls.drain(RunStage.REPORT)
    assert list(calls._watched) == ["a.saved()"]


def test_forgotten_calls_are_those_of_the_stage_and_the_actor(calls: Any) -> None:
    for name in ("rollout-0", "rollout-1"):
        calls.watch(f"{name}.run()", RunStage.ROLLOUT, print, name=name)
        calls.watch(f"{name}.evaluate()", RunStage.EVALUATION, print)
    calls.forget(RunStage.ROLLOUT, "rollout-1")
    assert list(calls._watched) == ["rollout-0.run()", "rollout-0.evaluate()", "rollout-1.evaluate()"]
    calls.forget(RunStage.EVALUATION)
    assert list(calls._watched) == ["rollout-0.run()"]


def test_a_call_that_fails_ends_the_run_and_names_its_stage(calls: Any, fake: FakeRay) -> None:
    calls.watch_all(["queue.lost()"], RunStage.QUEUE)
    fake.values["queue.lost()"] = failed("journal.sqlite: damaged")
    with pytest.raises(RunError, match=r"^queue: journal\.sqlite: damaged$"):
        calls.drain(RunStage.QUEUE)


def test_where_one_rank_failed_because_another_died_the_death_is_the_reason(fake: FakeRay) -> None:
    deaths: list[str] = []

    def lost(name: str, error: Exception) -> None:
        deaths.append(f"{name}: {error}")
        raise LearnerLost(str(error))

    calls: Any = WatchedCalls(lost, lambda doing: None)
    fake.values["rank-0.update()"] = failed("the collective was ended")
    fake.dead.add("rank-1")
    with pytest.raises(LearnerLost):
        calls.wait(["rank-0.update()", "rank-1.update()"], "update 3")
    assert deaths == ["update 3: rank-1 has died"]


PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
WAIT = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:85] "
REASONS = {
    f"{PAIR}Connection closed by peer [10.0.0.1]:1923. This is typically caused by a crash.": LearnerLost,
    f"{PAIR}Read error [10.0.0.1]:16258: Connection reset by peer.": LearnerLost,
    f"{PAIR}writev [10.0.0.1]:16258: Broken pipe": LearnerLost,
    "NCCL error in: x.cpp:7, remote process exited or there was a network error, NCCL version 2.27": LearnerLost,
    f"{WAIT}Timed out waiting 600000ms for recv operation to complete": RunError,
    "Connection reset by peer": RunError,
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_rank_that_has_lost_another_is_a_lost_learner_before_ray_finds_the_death_of_a_node(
    calls: Any, fake: FakeRay, reason: str
) -> None:
    fake.values["rank-0.update()"] = RayTaskError("update", "trace", RuntimeError(reason))
    with pytest.raises(RunError, match=r"^update 3: RuntimeError: ") as raised:
        calls.wait(["rank-0.update()", "rank-1.update()"], "update 3")
    assert type(raised.value) is REASONS[reason]


def test_a_call_whose_actor_died_is_made_again_of_another(calls: Any, fake: FakeRay) -> None:
    seen: list[int] = []
    calls.watch("a.ask()", RunStage.EVALUATION, seen.append, repeat=lambda: "b.ask()")
    fake.dead.add("a")
    fake.values["b.ask()"] = 5
    calls.drain(RunStage.EVALUATION)
    assert seen == [5]


def test_a_stall_is_counted_from_the_last_answer_that_was_waited_for(calls: Any, fake: FakeRay) -> None:
    fake.now += 50
    fake.values["a.first()"] = 1
    calls.wait(["a.first()"], "one")
    for seconds in (4, 5):
        fake.now += seconds
        calls.check_stall(10, "update 1", str)
    fake.now += 1
    with pytest.raises(RunError, match=r"^no progress for 10 s: the driver waits for update 1; why$"):
        calls.check_stall(10, "update 1", lambda: "why")


@pytest.mark.parametrize("stopped_s", [10, 400, 1e5])
def test_a_stop_of_the_driver_is_no_stall_of_others(calls: Any, fake: FakeRay, stopped_s: float) -> None:
    """As by Ctrl-Z, or by a scheduler that suspends a job for another one."""
    for _ in range(3):
        fake.now += stopped_s
        calls.check_stall(300, "update 1", str)
    with pytest.raises(RunError, match="no progress for 300 s"):
        for _ in range(600):
            fake.now += TICK_S
            calls.check_stall(300, "update 1", str)


def test_an_engine_may_take_as_long_to_start_as_its_configuration_says(driver_case: Callable[..., Case]) -> None:
    run = driver_case(2, "rollout.engine={kind='sglang', start_s=500}").with_model()
    for handle in run.rollouts.handles:
        handle.at_work = False
    run.wait(700, "update 1")
    run.rollouts.generating = False
    with pytest.raises(RunError, match="no progress for 300 s"):
        run.tick("update 1")
    run.rollouts.generating = True
    with pytest.raises(RunError, match=r"no progress for 800 s.*have not started: rollout-0, rollout-1"):
        run.wait(200, "update 1")
    run.rollouts._start(run.rollouts.handles[0])
    run.load_all()
    run.tick("update 1")
    with pytest.raises(RunError, match=r"no progress for 300 s.*the queue gives no answer.*not started: rollout-1$"):
        run.wait(400, "update 1")


def test_a_report_says_whether_an_engine_restarts_and_its_end_resets_the_time_without_progress() -> None:
    answers: list[Callable[[bytes], None]] = []
    resets: list[str] = []
    calls: Any = SimpleNamespace(
        watch=lambda _ref, _stage, handle, **_: answers.append(handle), reset_stall=lambda: resets.append("")
    )
    record: Any = SimpleNamespace(display=SimpleNamespace(reports_s=0), engine=lambda report: None)
    actor: Any = SimpleNamespace(report=SimpleNamespace(remote=bytes))
    handles = [RolloutHandle(f"rollout-{place}", place, actor, at_work=True) for place in (0, 1)]
    ReportPolling(actor, calls, record).check(handles)
    counters: dict[str, Any] = dict.fromkeys(
        ("version", "tokens", "trajectories", "busy_s", "idle_s", "swaps", "swap_s", "push_ms"), 0
    )
    for is_starting, expected in ((True, 0), (True, 0), (False, 1), (False, 1)):
        report = EngineReport(actor="rollout-1", checksum="", is_starting=is_starting, **counters)
        answers[2](encode(report))
        assert [handle.is_starting for handle in handles] == [False, is_starting] and len(resets) == expected


def test_an_engine_that_restarts_gets_that_time_again(driver_case: Callable[..., Case]) -> None:
    run = driver_case(2, "rollout.engine={kind='sglang', start_s=500}").with_model()
    run.rollouts.handles[0].is_starting = True
    run.wait(700, "update 1")
    run.rollouts.handles[0].is_starting = False
    with pytest.raises(RunError, match="no progress for 300 s"):
        run.tick("update 1")


def test_a_model_may_take_as_long_to_load_as_the_configuration_says(driver_case: Callable[..., Case]) -> None:
    run = driver_case(2, "watchdog.stall_s=20", "watchdog.load_s=500").with_model()
    with pytest.raises(RunError, match="no progress for 20 s"):
        run.wait(30, "update 1")
    run.stages._loaded_ranks = {}
    run.wait(490, "loading the model")
    with pytest.raises(RunError, match="no progress for 520 s"):
        run.wait(20, "loading the model")
