"""The queue's rules, one by one."""

import itertools
from pathlib import Path

import pytest
from conftest import trajectory

from streamppo.errors import JournalError, QueueError, TooManyFailures
from streamppo.queue.records import Saved
from streamppo.queue.snapshot import DurableQueue
from streamppo.types import Failure, Ticket, Trajectory, ints

CALLS = itertools.count()
"""Every request of its own."""


def queue(**changes: object) -> DurableQueue:
    settings: dict[str, object] = {
        "task": "t",
        "batch_size": 4,
        "samples_per_prompt": 2,
        "max_lag": 1,
        "whole_groups": False,
        "too_old": "mask",
        "max_attempts": 2,
        "max_failure_rate": 1.0,
    }
    return DurableQueue(**{**settings, **changes})  # pyright: ignore[reportArgumentType]


def done(ticket: Ticket, versions: tuple[int, ...] = (0, 0), **columns: object) -> Trajectory:
    made = trajectory([5] * len(versions), versions=versions, **columns)  # pyright: ignore[reportArgumentType]
    return Trajectory(
        **{name: getattr(made, name) for name in made.__struct_fields__ if name != "identity"}, identity=ticket.identity
    )


def fail(ticket: Ticket, reason: str = "no") -> Failure:
    return Failure(identity=ticket.identity, actor="a", stage="reward", reason=reason)


def publish_after_training(replay: DurableQueue, version: int) -> None:
    assert replay.take(version) is not None
    replay.publish(version + 1)


# --- admission -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_an_engine_may_hold_slots_for_max_lag_updates_ahead_of_its_own_version(max_lag: int) -> None:
    replay = queue(max_lag=max_lag)
    assert len(replay.issue("a", 0, 100, next(CALLS))) == (max_lag + 1) * 4
    assert replay.issue("a", 0, 100, next(CALLS)) == ()
    assert len(replay.issue("b", 1, 100, next(CALLS))) == 4


def test_prompts_are_issued_in_order_with_all_their_samples() -> None:
    tickets = queue().issue("a", 0, 5, next(CALLS))
    assert [(t.identity.prompt, t.identity.sample) for t in tickets] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_max_lag_zero_gives_exactly_one_batch_per_version() -> None:
    replay = queue(max_lag=0)
    for version in range(3):
        tickets = replay.issue("a", version, 100, next(CALLS))
        assert len(tickets) == 4
        for ticket in tickets:
            replay.put(done(ticket, (version, version)))
        assert replay.issue("a", version, 100, next(CALLS)) == ()
        batch = replay.take(version)
        assert batch is not None and all(t.oldest_version == version for t in batch.trajectories)
        replay.publish(version + 1)


# --- delivery ------------------------------------------------------------------------------------------------


def test_a_second_delivery_is_counted_and_ignored() -> None:
    replay = queue()
    ticket = replay.issue("a", 0, 1, next(CALLS))[0]
    assert replay.put(done(ticket)) is True
    assert replay.put(done(ticket)) is False
    assert (replay.report().stored, replay.report().duplicates) == (1, 1)


def test_a_zombie_cannot_deliver_for_a_slot_that_was_given_to_another() -> None:
    replay = queue()
    ticket = replay.issue("a", 0, 1, next(CALLS))[0]
    replay.lost("a")
    again = replay.issue("b", 0, 1, next(CALLS))[0]
    assert (again.slot, again.identity.attempt) == (ticket.slot, 1)
    assert replay.put(done(ticket)) is False
    assert replay.put(done(again)) is True


def test_a_consumed_trajectory_cannot_come_back() -> None:
    replay = queue()
    tickets = replay.issue("a", 0, 4, next(CALLS))
    for ticket in tickets:
        replay.put(done(ticket))
    publish_after_training(replay, 0)
    assert replay.put(done(tickets[0])) is False
    assert replay.report().ready == 0


def test_tokens_of_an_unknown_version_are_refused() -> None:
    replay = queue()
    with pytest.raises(QueueError, match="version 1, which the ledger does not know"):
        replay.put(done(replay.issue("a", 0, 1, next(CALLS))[0], (0, 1)))


@pytest.mark.parametrize(
    "columns",
    [
        {"logprobs": [-1.0, float("nan")]},
        {"logprobs": [-1.0, 0.5]},
        {"logprobs": [-1.0]},
        {"mask": [False, False]},
        {"reward": float("nan")},
        {"prompt": []},
    ],
)
def test_a_defective_trajectory_is_a_failure_with_a_reason(columns: dict[str, object]) -> None:
    replay = queue()
    ticket = replay.issue("a", 0, 1, next(CALLS))[0]
    assert replay.put(done(ticket, **columns)) is False
    assert replay.report().failed == {"engine": 1}
    assert replay.issue("a", 0, 1, next(CALLS))[0].slot == ticket.slot


# --- failures ------------------------------------------------------------------------------------------------


def test_a_failed_slot_is_sampled_again_before_new_ones_and_then_abandoned() -> None:
    replay = queue(max_lag=0)
    tickets = replay.issue("a", 0, 4, next(CALLS))
    replay.fail(fail(tickets[1]))
    (again,) = replay.issue("a", 0, 100, next(CALLS))
    assert (again.slot, again.identity.attempt) == (tickets[1].slot, 1)
    replay.fail(fail(again))
    (new,) = replay.issue("a", 0, 100, next(CALLS))
    assert (new.slot, new.identity.prompt) == (4, 2)
    assert replay.report().dropped["abandoned"] == 1


def test_a_group_is_abandoned_as_a_whole() -> None:
    replay = queue(max_lag=0, whole_groups=True, max_attempts=1)
    tickets = replay.issue("a", 0, 3, next(CALLS))
    replay.put(done(tickets[1]))
    replay.fail(fail(tickets[0]))
    assert replay.put(done(tickets[1])) is False
    rest = replay.issue("a", 0, 100, next(CALLS))
    assert [(t.identity.prompt, t.identity.sample) for t in rest] == [(1, 1), (2, 0), (2, 1)]
    assert replay.report().dropped["abandoned"] == 2


def test_groups_that_teach_nothing_can_give_way_to_other_prompts() -> None:
    replay = queue(max_lag=0, whole_groups=True, resample_equal=True)
    tickets = replay.issue("a", 0, 4, next(CALLS))
    for ticket, reward in zip(tickets, (1.0, 1.0, 0.0, 1.0), strict=True):
        replay.put(done(ticket, reward=reward))
    assert replay.take(0) is None
    others = replay.issue("a", 0, 9, next(CALLS))
    assert [ticket.identity.prompt for ticket in others] == [2, 2]
    assert replay.report().dropped["equal_group"] == 2


def test_a_lost_actor_is_no_failure_of_the_task() -> None:
    replay = queue(max_attempts=1)
    replay.issue("a", 0, 3, next(CALLS))
    replay.lost("a")
    assert [t.slot for t in replay.issue("b", 0, 3, next(CALLS))] == [0, 1, 2]
    assert replay.report().dropped == {"too_old": 0, "abandoned": 0, "equal_group": 0, "lost": 3}


def test_too_many_failures_stop_the_run_with_the_first_reasons() -> None:
    replay = queue(max_failure_rate=0.5, batch_size=400, max_attempts=9)
    tickets = replay.issue("a", 0, 64, next(CALLS))
    for number, ticket in enumerate(tickets[:33]):
        replay.fail(fail(ticket, f"reason {number % 5}"))
    for ticket in tickets[33:63]:
        replay.put(done(ticket))
    with pytest.raises(TooManyFailures, match=r"53% of the last 64 .*reason 0; reward: reason 1; reward: reason 2$"):
        replay.fail(fail(tickets[63], "reason 9"))


def test_retries_of_the_same_bad_prompts_do_not_make_a_high_rate() -> None:
    replay = queue(max_failure_rate=0.3, batch_size=400, max_attempts=1000)
    tickets = replay.issue("a", 0, 100, next(CALLS))
    for ticket in tickets[20:]:
        replay.put(done(ticket))
    for ticket in tickets[:20]:
        replay.fail(fail(ticket))
    for _ in range(500):
        (again,) = replay.issue("a", 0, 1, next(CALLS))
        replay.fail(fail(again))
    assert replay.report().failed == {"reward": 520}


# --- the take ------------------------------------------------------------------------------------------------


def test_a_batch_is_the_oldest_ready_trajectories_in_order_of_age() -> None:
    replay = queue()
    tickets = replay.issue("a", 0, 8, next(CALLS))
    for number in (6, 1, 4, 3):
        replay.put(done(tickets[number]))
    batch = replay.take(0)
    assert batch is not None
    assert [t.identity for t in batch.trajectories] == [tickets[n].identity for n in (1, 3, 4, 6)]


def test_asking_again_gives_the_same_batch_until_its_version_is_published() -> None:
    replay = queue()
    tickets = replay.issue("a", 0, 8, next(CALLS))
    for ticket in tickets[4:]:
        replay.put(done(ticket))
    batch = replay.take(0)
    for ticket in tickets[:4]:
        replay.put(done(ticket))
    assert replay.take(0) is batch
    following = replay.take(1)
    assert following is not None and following is not batch
    replay.publish(1)
    with pytest.raises(QueueError, match="batch 0 was asked for at version 1"):
        replay.take(0)


def test_only_the_running_update_and_the_next_can_take() -> None:
    with pytest.raises(QueueError):
        queue().take(2)


def test_groups_are_taken_whole() -> None:
    replay = queue(whole_groups=True)
    tickets = replay.issue("a", 0, 8, next(CALLS))
    for number in (0, 2, 3, 4, 6, 7):
        replay.put(done(tickets[number]))
    batch = replay.take(0)
    assert batch is not None
    assert [t.identity.prompt for t in batch.trajectories] == [1, 1, 3, 3]


def test_mask_keeps_a_trajectory_whose_old_tokens_stay_out_of_the_loss() -> None:
    replay = queue(max_lag=0)
    tickets = replay.issue("a", 0, 4, next(CALLS))
    for ticket in tickets[:3]:
        replay.put(done(ticket))
    replay.put(done(tickets[3]))
    publish_after_training(replay, 0)
    tickets = replay.issue("a", 1, 4, next(CALLS))
    for ticket, versions in zip(tickets, [(0, 1), (1, 1), (0, 0), (1, 1)], strict=True):
        replay.put(done(ticket, versions))
    assert replay.take(1) is None, "one trajectory has no token that is young enough"
    (again,) = replay.issue("a", 1, 9, next(CALLS))
    replay.put(done(again, (1, 1)))
    batch = replay.take(1)
    assert batch is not None
    assert batch.min_version == 1
    assert [ints(t.versions).tolist() for t in batch.trajectories] == [[0, 1], [1, 1], [1, 1], [1, 1]]
    assert (replay.report().masked_tokens, replay.report().dropped["too_old"]) == (1, 1)


def test_drop_samples_the_prompt_again_and_reports_the_lengths() -> None:
    replay = queue(max_lag=0, too_old="drop")
    for ticket in replay.issue("a", 0, 4, next(CALLS)):
        replay.put(done(ticket))
    publish_after_training(replay, 0)
    tickets = replay.issue("a", 1, 4, next(CALLS))
    replay.put(done(tickets[0], (0, 1, 1, 1)))
    for ticket in tickets[1:]:
        replay.put(done(ticket, (1, 1)))
    assert replay.take(1) is None
    (again,) = replay.issue("a", 1, 9, next(CALLS))
    assert again.slot == tickets[0].slot
    replay.put(done(again, (1, 1)))
    assert replay.take(1) is not None
    replay.publish(2)
    report = replay.report()
    assert report.dropped["too_old"] == 1
    assert (report.mean_tokens_consumed, report.mean_tokens_dropped) == (2.0, 4.0)


def test_wait_holds_the_flow_until_the_oldest_are_there() -> None:
    replay = queue(too_old="wait")
    tickets = replay.issue("a", 0, 8, next(CALLS))
    for ticket in tickets[1:]:
        replay.put(done(ticket))
    assert replay.take(0) is None
    replay.put(done(tickets[0]))
    batch = replay.take(0)
    assert batch is not None
    assert [t.identity for t in batch.trajectories] == [t.identity for t in tickets[:4]]


# --- versions ------------------------------------------------------------------------------------------------


def test_a_version_is_published_once_in_order_and_only_with_its_batch() -> None:
    replay = queue()
    with pytest.raises(QueueError, match="without the batch"):
        replay.publish(1)
    with pytest.raises(QueueError, match="published after version 0"):
        replay.publish(2)
    for ticket in replay.issue("a", 0, 4, next(CALLS)):
        replay.put(done(ticket))
    publish_after_training(replay, 0)
    replay.publish(1)
    assert (replay.version, replay.report().consumed) == (1, 4)


def test_the_same_request_gets_the_same_tickets_until_they_are_delivered() -> None:
    replay = queue()
    tickets = replay.issue("a", 0, 2, 7)
    assert replay.issue("a", 0, 9, 7) == tickets
    replay.put(done(tickets[0]))
    assert replay.issue("a", 0, 9, 7) == tickets[1:]
    assert replay.issue("a", 0, 1, 6) == (), "a request that was overtaken"
    assert replay.issue("a", 0, 1, 8)[0].slot == 2


def test_a_defective_trajectory_is_kept_as_a_dead_letter_with_its_reason() -> None:
    replay = queue()
    bad = done(replay.issue("a", 0, 1, 0)[0], reward=float("inf"))
    replay.put(bad)
    (letter,) = replay.drain().dead
    assert (letter.trajectory, letter.reason) == (bad, "the reward is inf")
    assert replay.drain().dead == ()


def endings(replay: DurableQueue) -> list[tuple[int, int, str, str]]:
    return [(one.number, one.identity.attempt, one.state, one.reason) for one in replay.drain().ended]


def test_every_attempt_that_comes_to_nothing_is_noted_with_its_reason() -> None:
    replay = queue(too_old="drop", max_lag=0, max_attempts=2)
    replay.issue("gone", 0, 1, 0)
    replay.lost("gone")
    first, second, third, fourth = replay.issue("a", 0, 4, 0)
    replay.put(done(first, reward=float("inf")))
    replay.fail(fail(second, "too slow"))
    assert endings(replay) == [
        (0, 0, "lost", "gone was given up for dead"),
        (0, 1, "dead_letter", "engine: the reward is inf"),
        (1, 0, "failed", "reward: too slow"),
    ]
    again = replay.issue("a", 0, 2, 1)
    replay.fail(fail(again[0], "no"))
    assert endings(replay) == [(0, 2, "abandoned", "sample 0 failed 2 times: reward: no")]
    for ticket in (again[1], third, fourth, *replay.issue("a", 0, 1, 2)):
        replay.put(done(ticket))
    publish_after_training(replay, 0)
    for ticket in replay.issue("a", 1, 4, 3):
        replay.put(done(ticket, (0, 1)))
    assert replay.take(1) is None
    assert [(state, reason) for _, _, state, reason in endings(replay)] == [
        ("too_old", "sampled by versions from 0 on, 1 is the oldest allowed")
    ] * 4


def test_groups_that_are_given_up_are_noted_sample_by_sample() -> None:
    replay = queue(whole_groups=True, resample_equal=True, max_attempts=1)
    equal, _, failing, other = replay.issue("a", 0, 4, 0)
    replay.put(done(equal, reward=1.0))
    replay.put(done(_, reward=1.0))
    assert endings(replay) == [(number, 0, "equal_group", "all rewards are 1") for number in (0, 1)]
    replay.put(done(other))
    replay.fail(fail(failing))
    why = "sample 0 failed 1 times: reward: no"
    assert endings(replay) == [(2, 0, "abandoned", why), (3, 0, "abandoned", why)]


def test_what_has_changed_is_told_once() -> None:
    replay = queue()
    tickets = replay.issue("a", 0, 4, 0)
    assert [slot.state for slot in replay.drain().slots] == ["issued"] * 4
    replay.put(done(tickets[2]))
    assert [(slot.number, slot.state) for slot in replay.drain().slots] == [(2, "ready")]
    assert replay.drain().slots == ()


def test_a_rebuilt_queue_goes_on_with_what_waits_and_gives_the_same_batch() -> None:
    replay = queue()
    tickets = replay.issue("a", 0, 8, 0)
    for ticket in tickets[1:6]:
        replay.put(done(ticket))
    batch = replay.take(0)
    changes, rebuilt = replay.drain(), queue()
    rebuilt.restore(Saved(changes.counters, changes.slots, changes.leases), Path("journal"))
    assert rebuilt.take(0) == batch
    rebuilt.lost_all()
    again = rebuilt.issue("b", 0, 9, 0)
    assert [(ticket.slot, ticket.identity.attempt) for ticket in again] == [(0, 1), (6, 1), (7, 1)]
    assert rebuilt.report().ready == 1


@pytest.mark.parametrize(("batch_size", "opened"), [(2, 0), (4, 4), (8, 12)])
def test_a_batch_size_that_was_changed_bounds_what_is_held_from_then_on(batch_size: int, opened: int) -> None:
    """At version 3 with a lag of 1 two batches may be held, and one old one of 4 is."""
    replay, rebuilt = queue(), queue(batch_size=batch_size)
    for version in range(3):
        for ticket in replay.issue("a", version, 100, next(CALLS)):
            replay.put(done(ticket, (version, version)))
        publish_after_training(replay, version)
    changes = replay.drain()
    alive = tuple(slot for slot in changes.slots if slot.number not in changes.gone)
    rebuilt.restore(Saved(changes.counters, alive, ()), Path("journal"))
    assert rebuilt.report().ready == 4
    tickets = rebuilt.issue("a", 3, 100, next(CALLS))
    assert len(tickets) == opened
    for ticket in tickets:
        rebuilt.put(done(ticket, (3, 3)))
    publish_after_training(rebuilt, 3)
    assert len(rebuilt.issue("a", 4, 100, next(CALLS))) == batch_size


def test_a_journal_of_another_run_is_refused() -> None:
    changes, other = queue().drain(), queue(task="other")
    with pytest.raises(JournalError, match=r"^runs/a/journal.sqlite: of another run.*\('t', 2, 1\).*\('other', 2, 1\)"):
        other.restore(Saved(changes.counters, (), ()), Path("runs/a/journal.sqlite"))


def test_the_watchdogs_sentence_names_where_trajectories_are() -> None:
    replay = queue()
    replay.issue("rollout-0", 0, 3, next(CALLS))
    replay.put(done(replay.issue("rollout-1", 0, 1, next(CALLS))[0]))
    assert "1 of 4 trajectories ready" in replay.waiting_for()
    assert "3 at rollout-0" in replay.waiting_for()
