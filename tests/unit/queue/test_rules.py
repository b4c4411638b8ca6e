"""The queue's rules, one by one."""

import gc
import itertools
from pathlib import Path

import msgspec
import pytest
from conftest import trajectory

from streamppo.config.correction import Resample
from streamppo.config.queue import Segments
from streamppo.errors import JournalError, QueueError, TooManyFailures
from streamppo.queue import report
from streamppo.queue.rules.records import Changes, Counters
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.slot import Slot
from streamppo.queue.rules.state import QueueSettings, QueueState
from streamppo.queue.store import snapshot
from streamppo.types import Failure, QueueReport, Ticket, Trajectory, decode, encode, ints

CALLS = itertools.count()
"""Every request of its own."""


def settings(**changes: object) -> QueueSettings:
    chosen: dict[str, object] = {
        "task": "t",
        "batch_size": 4,
        "samples_per_prompt": 2,
        "max_lag": 1,
        "whole_groups": False,
        "too_old": "mask",
        "max_attempts": 2,
        "max_failure_rate": 1.0,
    }
    chosen |= changes
    chosen.setdefault("flow_lag", chosen["max_lag"])
    return QueueSettings(**chosen)  # pyright: ignore[reportArgumentType]


def queue(**changes: object) -> QueueRules:
    return QueueRules(settings(**changes), QueueState())


def counted(rules: QueueRules) -> QueueReport:
    return report.report(rules.state)


def rebuilt_from(saved: Changes, **changes: object) -> QueueRules:
    chosen = settings(**changes)
    return QueueRules(chosen, snapshot.rebuild_state(chosen, saved, Path("runs/a/journal.sqlite")))


def drain(rules: QueueRules) -> Changes:
    return snapshot.take_changes(rules.settings, rules.state)


def done(ticket: Ticket, versions: tuple[int, ...] = (0, 0), **columns: object) -> Trajectory:
    made = trajectory([5] * len(versions), versions=versions, **columns)  # pyright: ignore[reportArgumentType]
    return Trajectory(
        **{name: getattr(made, name) for name in made.__struct_fields__ if name != "identity"}, identity=ticket.identity
    )


def fail(ticket: Ticket, reason: str = "no") -> Failure:
    return Failure(identity=ticket.identity, actor="a", stage="reward", reason=reason)


def publish_after_training(rules: QueueRules, version: int) -> None:
    assert rules.take(version) is not None
    rules.publish(version + 1)


# --- admission -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_an_engine_may_hold_slots_for_max_lag_updates_ahead_of_its_own_version(max_lag: int) -> None:
    rules = queue(max_lag=max_lag)
    assert len(rules.issue("a", 0, 100, next(CALLS))) == (max_lag + 1) * 4
    assert rules.issue("a", 0, 100, next(CALLS)) == ()
    assert len(rules.issue("b", 1, 100, next(CALLS))) == 4


def test_admission_is_as_the_example_in_the_rules_says() -> None:
    rules = queue(samples_per_prompt=1, max_attempts=1)
    first = rules.issue("a", 0, 100, next(CALLS))
    assert [ticket.slot for ticket in first] == list(range(8))
    for ticket in first[:4]:
        rules.put([done(ticket)])
    assert rules.take(0) is not None and rules.issue("a", 0, 100, next(CALLS)) == ()
    rules.publish(1)
    assert (rules.state.held, rules.issue("a", 0, 100, next(CALLS))) == (4, ())
    assert [ticket.slot for ticket in rules.issue("a", 1, 100, next(CALLS))] == [8, 9, 10, 11]
    rules.fail(fail(first[5]))
    assert [ticket.slot for ticket in rules.issue("a", 1, 100, next(CALLS))] == [12]


def test_prompts_are_issued_in_order_with_all_their_samples() -> None:
    tickets = queue().issue("a", 0, 5, next(CALLS))
    assert [(t.identity.prompt, t.identity.sample) for t in tickets] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_max_lag_zero_gives_exactly_one_batch_per_version() -> None:
    rules = queue(max_lag=0)
    for version in range(3):
        tickets = rules.issue("a", version, 100, next(CALLS))
        assert len(tickets) == 4
        for ticket in tickets:
            rules.put([done(ticket, (version, version))])
        assert rules.issue("a", version, 100, next(CALLS)) == ()
        batch = rules.take(version)
        assert batch is not None and all(t.oldest_version == version for t in batch.trajectories)
        rules.publish(version + 1)


# --- delivery ------------------------------------------------------------------------------------------------


def test_a_second_delivery_is_counted_and_ignored() -> None:
    rules = queue()
    ticket = rules.issue("a", 0, 1, next(CALLS))[0]
    assert rules.put([done(ticket)]) == 1
    assert rules.put([done(ticket)]) == 0
    assert (counted(rules).stored, counted(rules).duplicates) == (1, 1)


def test_a_zombie_cannot_deliver_for_a_slot_that_was_given_to_another() -> None:
    rules = queue()
    ticket = rules.issue("a", 0, 1, next(CALLS))[0]
    rules.mark_dead("a")
    again = rules.issue("b", 0, 1, next(CALLS))[0]
    assert (again.slot, again.identity.attempt) == (ticket.slot, 1)
    assert rules.put([done(ticket)]) == 0
    assert rules.put([done(again)]) == 1


def test_a_consumed_trajectory_cannot_come_back() -> None:
    rules = queue()
    tickets = rules.issue("a", 0, 4, next(CALLS))
    for ticket in tickets:
        rules.put([done(ticket)])
    publish_after_training(rules, 0)
    assert rules.put([done(tickets[0])]) == 0
    assert counted(rules).ready == 0


def test_tokens_of_an_unknown_version_are_refused() -> None:
    rules = queue()
    with pytest.raises(QueueError, match="version 1, which was not published"):
        rules.put([done(rules.issue("a", 0, 1, next(CALLS))[0], (0, 1))])


def test_a_delivery_with_tokens_of_an_unknown_version_is_refused_as_a_whole() -> None:
    rules = queue()
    tickets = rules.issue("a", 0, 2, next(CALLS))
    with pytest.raises(QueueError, match="version 3, which was not published"):
        rules.put([done(tickets[0]), done(tickets[1], (0, 3))])
    assert (counted(rules).stored, counted(rules).tokens["delivered"]) == (0, 0)
    rules.put([done(ticket) for ticket in tickets])
    assert counted(rules).stored == 2


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
    rules = queue()
    ticket = rules.issue("a", 0, 1, next(CALLS))[0]
    assert rules.put([done(ticket, **columns)]) == 0
    assert counted(rules).failed == {"engine": 1}
    assert rules.issue("a", 0, 1, next(CALLS))[0].slot == ticket.slot


# --- failures ------------------------------------------------------------------------------------------------


def test_a_failed_slot_is_sampled_again_before_new_ones_and_then_abandoned() -> None:
    rules = queue(max_lag=0)
    tickets = rules.issue("a", 0, 4, next(CALLS))
    rules.fail(fail(tickets[1]))
    (again,) = rules.issue("a", 0, 100, next(CALLS))
    assert (again.slot, again.identity.attempt) == (tickets[1].slot, 1)
    rules.fail(fail(again))
    (new,) = rules.issue("a", 0, 100, next(CALLS))
    assert (new.slot, new.identity.prompt) == (4, 2)
    assert counted(rules).dropped["abandoned"] == 1


def test_a_group_is_abandoned_as_a_whole() -> None:
    rules = queue(max_lag=0, whole_groups=True, max_attempts=1)
    tickets = rules.issue("a", 0, 3, next(CALLS))
    rules.put([done(tickets[1])])
    rules.fail(fail(tickets[0]))
    assert rules.put([done(tickets[1])]) == 0
    rest = rules.issue("a", 0, 100, next(CALLS))
    assert [(t.identity.prompt, t.identity.sample) for t in rest] == [(1, 1), (2, 0), (2, 1)]
    assert counted(rules).dropped["abandoned"] == 2


def test_groups_that_teach_nothing_can_give_way_to_other_prompts() -> None:
    rules = queue(max_lag=0, whole_groups=True, resample=Resample())
    tickets = rules.issue("a", 0, 4, next(CALLS))
    for ticket, reward in zip(tickets, (1.0, 1.0, 0.0, 1.0), strict=True):
        rules.put([done(ticket, reward=reward)])
    assert rules.take(0) is None
    others = rules.issue("a", 0, 9, next(CALLS))
    assert [ticket.identity.prompt for ticket in others] == [2, 2]
    assert counted(rules).dropped["resampled"] == 2


@pytest.mark.parametrize(
    ("resample", "reason"),
    [
        (Resample(), None),
        (Resample(component="right"), "all values of 'right' are 1"),
        (Resample(component="form"), None),
        (Resample(mean=(0.5, 0.75)), None),
        (Resample(mean=(0.0, 0.7)), "the mean of the rewards, 0.75, is outside of 0 to 0.7"),
        (Resample(component="form", mean=(0.3, 1.0)), "the mean of the values of 'form', 0.25, is outside of 0.3 to 1"),
    ],
)
def test_groups_are_judged_by_a_component_and_by_their_difficulty(resample: Resample, reason: str | None) -> None:
    rules = queue(max_lag=0, whole_groups=True, resample=resample)
    tickets = rules.issue("a", 0, 2, next(CALLS))
    for ticket, reward, form in zip(tickets, (0.5, 1.0), (0.0, 0.5), strict=True):
        components = {"right": 1.0, "form": form}
        rules.put([msgspec.structs.replace(done(ticket, reward=reward), components=components)])
    assert endings(rules) == ([(number, 0, "resampled", reason) for number in (0, 1)] if reason else [])


def test_a_lost_actor_is_no_failure_of_the_task() -> None:
    rules = queue(max_attempts=1)
    rules.issue("a", 0, 3, next(CALLS))
    rules.mark_dead("a")
    assert [t.slot for t in rules.issue("b", 0, 3, next(CALLS))] == [0, 1, 2]
    assert counted(rules).dropped == {"too_old": 0, "abandoned": 0, "resampled": 0, "lost": 3}


def test_too_many_failures_stop_the_run_with_the_first_reasons() -> None:
    rules = queue(max_failure_rate=0.5, batch_size=400, max_attempts=9)
    tickets = rules.issue("a", 0, 64, next(CALLS))
    for number, ticket in enumerate(tickets[:33]):
        rules.fail(fail(ticket, f"reason {number % 5}"))
    for ticket in tickets[33:63]:
        rules.put([done(ticket)])
    with pytest.raises(TooManyFailures, match=r"53% of the last 64 .*reason 0; reward: reason 1; reward: reason 2$"):
        rules.fail(fail(tickets[63], "reason 9"))


def test_retries_of_the_same_bad_prompts_do_not_make_a_high_rate() -> None:
    rules = queue(max_failure_rate=0.3, batch_size=400, max_attempts=1000)
    tickets = rules.issue("a", 0, 100, next(CALLS))
    for ticket in tickets[20:]:
        rules.put([done(ticket)])
    for ticket in tickets[:20]:
        rules.fail(fail(ticket))
    for _ in range(500):
        (again,) = rules.issue("a", 0, 1, next(CALLS))
        rules.fail(fail(again))
    assert counted(rules).failed == {"reward": 520}


# --- the take ------------------------------------------------------------------------------------------------


def test_a_batch_is_the_oldest_ready_trajectories_in_order_of_age() -> None:
    rules = queue()
    tickets = rules.issue("a", 0, 8, next(CALLS))
    for number in (6, 1, 4, 3):
        rules.put([done(tickets[number])])
    batch = rules.take(0)
    assert batch is not None
    assert [t.identity for t in batch.trajectories] == [tickets[n].identity for n in (1, 3, 4, 6)]


def test_asking_again_gives_the_same_batch_until_its_version_is_published() -> None:
    rules = queue()
    tickets = rules.issue("a", 0, 8, next(CALLS))
    for ticket in tickets[4:]:
        rules.put([done(ticket)])
    batch = rules.take(0)
    for ticket in tickets[:4]:
        rules.put([done(ticket)])
    assert rules.take(0) is batch
    following = rules.take(1)
    assert following is not None and following is not batch
    rules.publish(1)
    with pytest.raises(QueueError, match="batch 0 was requested at version 1"):
        rules.take(0)


def test_only_the_running_update_and_the_next_can_take() -> None:
    with pytest.raises(QueueError):
        queue().take(2)


def test_groups_are_taken_whole() -> None:
    rules = queue(whole_groups=True)
    tickets = rules.issue("a", 0, 8, next(CALLS))
    for number in (0, 2, 3, 4, 6, 7):
        rules.put([done(tickets[number])])
    batch = rules.take(0)
    assert batch is not None
    assert [t.identity.prompt for t in batch.trajectories] == [1, 1, 3, 3]


def test_mask_keeps_a_trajectory_whose_old_tokens_stay_out_of_the_loss() -> None:
    rules = queue(max_lag=0)
    tickets = rules.issue("a", 0, 4, next(CALLS))
    for ticket in tickets[:3]:
        rules.put([done(ticket)])
    rules.put([done(tickets[3])])
    publish_after_training(rules, 0)
    tickets = rules.issue("a", 1, 4, next(CALLS))
    for ticket, versions in zip(tickets, [(0, 1), (1, 1), (0, 0), (1, 1)], strict=True):
        rules.put([done(ticket, versions)])
    assert rules.take(1) is None, "one trajectory has no token that is young enough"
    (again,) = rules.issue("a", 1, 9, next(CALLS))
    rules.put([done(again, (1, 1))])
    batch = rules.take(1)
    assert batch is not None
    assert batch.min_version == 1
    assert [ints(t.versions).tolist() for t in batch.trajectories] == [[0, 1], [1, 1], [1, 1], [1, 1]]
    assert (counted(rules).masked_tokens, counted(rules).dropped["too_old"]) == (1, 1)


def test_drop_samples_the_prompt_again_and_reports_the_lengths() -> None:
    rules = queue(max_lag=0, too_old="drop")
    for ticket in rules.issue("a", 0, 4, next(CALLS)):
        rules.put([done(ticket)])
    publish_after_training(rules, 0)
    tickets = rules.issue("a", 1, 4, next(CALLS))
    rules.put([done(tickets[0], (0, 1, 1, 1))])
    for ticket in tickets[1:]:
        rules.put([done(ticket, (1, 1))])
    assert rules.take(1) is None
    (again,) = rules.issue("a", 1, 9, next(CALLS))
    assert again.slot == tickets[0].slot
    rules.put([done(again, (1, 1))])
    assert rules.take(1) is not None
    rules.publish(2)
    report = counted(rules)
    assert report.dropped["too_old"] == 1
    assert (report.mean_tokens_consumed, report.mean_tokens_dropped) == (2.0, 4.0)
    assert {name: tokens for name, tokens in report.tokens.items() if tokens} == {
        "delivered": 4 + 8 * 2,
        "consumed": 8 * 2,
        "too_old": 4,
    }


def test_wait_holds_the_flow_until_the_oldest_are_there() -> None:
    rules = queue(too_old="wait")
    tickets = rules.issue("a", 0, 8, next(CALLS))
    for ticket in tickets[1:]:
        rules.put([done(ticket)])
    assert rules.take(0) is None
    rules.put([done(tickets[0])])
    batch = rules.take(0)
    assert batch is not None
    assert [t.identity for t in batch.trajectories] == [t.identity for t in tickets[:4]]


# --- a lag that is steered -----------------------------------------------------------------------------------


def steered() -> QueueRules:
    return queue(max_lag=4, first_lag=1)


def take_and_publish(rules: QueueRules, admitted_lag: int) -> None:
    version = rules.state.version
    for ticket in rules.issue("a", version, 4, next(CALLS)):
        rules.put([done(ticket, (version,))])
    batch = rules.take(version)
    assert batch is not None and batch.min_version == version - 4, "the hard bound stays"
    rules.publish(version + 1, admitted_lag)


def test_the_lag_that_the_learner_tells_is_admitted_and_never_more_than_the_bound() -> None:
    for told, admitted in ((0, 0), (3, 3), (9, 4)):
        rules = steered()
        take_and_publish(rules, told)
        assert len(rules.issue("b", 1, 100, next(CALLS))) == (admitted + 1) * 4
    assert len(steered().issue("b", 0, 100, next(CALLS))) == 2 * 4, "before anything is told"


def test_a_queue_that_died_admits_the_lag_that_it_was_told_of() -> None:
    rules = steered()
    take_and_publish(rules, 3)
    counters = decode(encode(drain(rules).counters), Counters)
    again = rebuilt_from(Changes(counters, (), ()), max_lag=4, first_lag=1)
    assert len(again.issue("b", 1, 100, next(CALLS))) == 4 * 4


def test_a_version_that_is_published_again_changes_no_lag() -> None:
    rules = steered()
    take_and_publish(rules, 3)
    rules.publish(1, 0)
    assert rules.state.admitted_lag == 3


# --- versions ------------------------------------------------------------------------------------------------


def test_a_version_is_published_once_in_order_and_only_with_its_batch() -> None:
    rules = queue()
    with pytest.raises(QueueError, match="without the batch"):
        rules.publish(1)
    with pytest.raises(QueueError, match="published after version 0"):
        rules.publish(2)
    for ticket in rules.issue("a", 0, 4, next(CALLS)):
        rules.put([done(ticket)])
    publish_after_training(rules, 0)
    rules.publish(1)
    assert (rules.state.version, counted(rules).consumed) == (1, 4)


def test_the_same_request_gets_the_same_tickets_until_they_are_delivered() -> None:
    rules = queue()
    tickets = rules.issue("a", 0, 2, 7)
    assert rules.issue("a", 0, 9, 7) == tickets
    rules.put([done(tickets[0])])
    assert rules.issue("a", 0, 9, 7) == tickets[1:]
    assert rules.issue("a", 0, 1, 6) == (), "a request that was overtaken"
    assert rules.issue("a", 0, 1, 8)[0].slot == 2


def test_a_defective_trajectory_is_kept_as_a_dead_letter_with_its_reason() -> None:
    rules = queue()
    bad = done(rules.issue("a", 0, 1, 0)[0], reward=float("inf"))
    rules.put([bad])
    (letter,) = drain(rules).dead
    assert (letter.trajectory, letter.reason) == (bad, "the reward is inf")
    assert drain(rules).dead == ()


def endings(rules: QueueRules) -> list[tuple[int, int, str, str]]:
    return [(one.number, one.identity.attempt, one.state, one.reason) for one in drain(rules).ended]


def test_every_attempt_that_comes_to_nothing_is_noted_with_its_reason() -> None:
    rules = queue(too_old="drop", max_lag=0, max_attempts=2)
    rules.issue("gone", 0, 1, 0)
    rules.mark_dead("gone")
    first, second, third, fourth = rules.issue("a", 0, 4, 0)
    rules.put([done(first, reward=float("inf"))])
    rules.fail(fail(second, "too slow"))
    assert endings(rules) == [
        (0, 0, "lost", "gone was marked dead"),
        (0, 1, "dead_letter", "engine: the reward is inf"),
        (1, 0, "failed", "reward: too slow"),
    ]
    again = rules.issue("a", 0, 2, 1)
    rules.fail(fail(again[0], "no"))
    assert endings(rules) == [(0, 2, "abandoned", "sample 0 failed 2 times: reward: no")]
    for ticket in (again[1], third, fourth, *rules.issue("a", 0, 1, 2)):
        rules.put([done(ticket)])
    publish_after_training(rules, 0)
    for ticket in rules.issue("a", 1, 4, 3):
        rules.put([done(ticket, (0, 1))])
    assert rules.take(1) is None
    assert [(state, reason) for _, _, state, reason in endings(rules)] == [
        ("too_old", "sampled by versions from 0 on, 1 is the oldest allowed")
    ] * 4


def test_groups_that_are_given_up_are_noted_sample_by_sample() -> None:
    rules = queue(whole_groups=True, resample=Resample(), max_attempts=1)
    equal, _, failing, other = rules.issue("a", 0, 4, 0)
    rules.put([done(equal, reward=1.0)])
    rules.put([done(_, reward=1.0)])
    assert endings(rules) == [(number, 0, "resampled", "all rewards are 1") for number in (0, 1)]
    rules.put([done(other)])
    rules.fail(fail(failing))
    why = "sample 0 failed 1 times: reward: no"
    assert endings(rules) == [(2, 0, "abandoned", why), (3, 0, "abandoned", why)]


def test_a_change_is_drained_once() -> None:
    rules = queue()
    tickets = rules.issue("a", 0, 4, 0)
    assert [slot.state for slot in drain(rules).slots] == ["issued"] * 4
    rules.put([done(tickets[2])])
    assert [(slot.number, slot.state) for slot in drain(rules).slots] == [(2, "ready")]
    assert drain(rules).slots == ()


def test_a_rebuilt_queue_goes_on_with_what_waits_and_gives_the_same_batch() -> None:
    rules = queue()
    tickets = rules.issue("a", 0, 8, 0)
    for ticket in tickets[1:6]:
        rules.put([done(ticket)])
    batch = rules.take(0)
    changes = drain(rules)
    rebuilt = rebuilt_from(changes)
    assert rebuilt.take(0) == batch
    rebuilt.reopen_all()
    again = rebuilt.issue("b", 0, 9, 0)
    assert [(ticket.slot, ticket.identity.attempt) for ticket in again] == [(0, 1), (6, 1), (7, 1)]
    assert counted(rebuilt).ready == 1


@pytest.mark.parametrize(("batch_size", "opened"), [(2, 0), (4, 4), (8, 12)])
def test_a_batch_size_that_was_changed_bounds_what_is_held_from_then_on(batch_size: int, opened: int) -> None:
    """At version 3 with a lag of 1 two batches may be held, and one old one of 4 is."""
    rules = queue()
    for version in range(3):
        for ticket in rules.issue("a", version, 100, next(CALLS)):
            rules.put([done(ticket, (version, version))])
        publish_after_training(rules, version)
    changes = drain(rules)
    alive = tuple(slot for slot in changes.slots if (slot.number, slot.part) not in changes.removed)
    rebuilt = rebuilt_from(Changes(changes.counters, alive, ()), batch_size=batch_size)
    assert counted(rebuilt).ready == 4
    tickets = rebuilt.issue("a", 3, 100, next(CALLS))
    assert len(tickets) == opened
    for ticket in tickets:
        rebuilt.put([done(ticket, (3, 3))])
    publish_after_training(rebuilt, 3)
    assert len(rebuilt.issue("a", 4, 100, next(CALLS))) == batch_size


def test_a_journal_of_another_run_is_refused() -> None:
    changes = drain(queue())
    with pytest.raises(JournalError, match=r"^runs/a/journal.sqlite: of another run.*\('t', 2, 1\).*\('other', 2, 1\)"):
        rebuilt_from(Changes(changes.counters, (), ()), task="other")


def test_the_watchdogs_sentence_names_where_trajectories_are() -> None:
    rules = queue()
    rules.issue("rollout-0", 0, 3, next(CALLS))
    rules.put([done(rules.issue("rollout-1", 0, 1, next(CALLS))[0])])
    assert "1 of 4 trajectories ready" in report.waiting_for(rules.settings, rules.state)
    assert "3 at rollout-0" in report.waiting_for(rules.settings, rules.state)


# --- segments --------------------------------------------------------------------------------------------------


def segmented(**changes: object) -> QueueRules:
    return queue(segments=Segments(), flow_lag=1, samples_per_prompt=1, max_lag=2, **changes)


def segment(ticket: Ticket, number: int, finish: str = "cut") -> Trajectory:
    identity = msgspec.structs.replace(ticket.identity, segment=number)
    return done(msgspec.structs.replace(ticket, identity=identity), finish=finish)


def test_a_completion_that_goes_on_is_no_answer_to_a_request_and_its_failures_add_up() -> None:
    rules = segmented()
    (ticket,) = rules.issue("a", 0, 1, 7)
    rules.put([segment(ticket, 0)])
    changes = drain(rules)
    rebuilt = rebuilt_from(changes, **rules.settings._asdict() | {"task": "t"})
    assert rebuilt.issue("a", 0, 0, 7) == (), "its actor samples it already"
    for attempt in range(2):
        rebuilt.put([segment(ticket, 0)]) if attempt else None
        rebuilt.fail(
            Failure(identity=msgspec.structs.replace(ticket.identity, segment=1), actor="a", stage="reward", reason="-")
        )
        if attempt == 0:
            (ticket,) = rebuilt.issue("a", 0, 1, 8)
            assert (ticket.identity.attempt, ticket.identity.segment) == (1, 0)
    told = counted(rebuilt)
    assert (told.dropped["abandoned"], told.in_flight, told.ready) == (1, 0, 2)
    assert (told.cut, told.orphaned) == (2, 2)


def test_a_segment_that_is_too_old_as_a_whole_is_given_up_and_its_completion_goes_on() -> None:
    rules = segmented(batch_size=1)
    rules.cut_for("a", 0)
    first, second = rules.issue("a", 0, 2, 0)
    for version in range(3):
        rules.put([segment(first, version)])
        rules.cut_for("a", version)
        publish_after_training(rules, version)
    rules.put([segment(second, 0)])
    rules.cut_for("a", 3)
    rules.put([msgspec.structs.replace(segment(first, 3), versions=b"\3\0\0\0" * 2)])
    batch = rules.take(3)
    assert batch and [one.identity.segment for one in batch.trajectories] == [3]
    told = counted(rules)
    assert (told.dropped["too_old"], told.masked_tokens, told.in_flight) == (1, 0, 2)
    assert told.tokens["too_old"] == 2


# --- memory --------------------------------------------------------------------------------------------------


def test_slots_that_are_consumed_or_abandoned_are_freed_without_a_pass_for_garbage() -> None:
    def alive() -> int:
        return sum(type(one) is Slot for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        rules = queue(samples_per_prompt=2, max_attempts=1)
        for version in range(20):
            failed, *finished = rules.issue("a", version, 100, next(CALLS))
            rules.fail(fail(failed))
            for ticket in finished:
                rules.put([done(ticket, versions=(version, version))])
            publish_after_training(rules, version)
            drain(rules)
        assert alive() - before <= 4 * 4, "those that are held, and those of the last request"
    finally:
        gc.enable()
