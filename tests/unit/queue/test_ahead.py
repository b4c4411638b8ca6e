"""Engines sample ahead as far as the learner needs: exactly by hand, and to the same rates in simulated time."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import REPOSITORY, trajectory
from msgspec import structs

from streamppo.config import file as configfile
from streamppo.queue.rules.ahead import NeededLag
from streamppo.queue.rules.records import Changes, Counters
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import QueueSettings, QueueState, queue_settings
from streamppo.queue.store import snapshot
from streamppo.types import Ticket, decode, encode

sys.path.insert(0, str(REPOSITORY))

from benchmarks.cost import ahead as study

CALLS = itertools.count()
BATCH = 4
CONFIG = REPOSITORY / "configs" / "math.toml"


def settings(max_lag: int = 16, *, as_needed: bool = True) -> QueueSettings:
    return QueueSettings("t", BATCH, 1, max_lag, max_lag, False, "mask", 3, 1.0, as_needed=as_needed)


class HandRun:
    """Rules, one engine that always has the newest version, and a learner, moved by hand."""

    def __init__(self, max_lag: int = 16) -> None:
        self.rules = QueueRules(settings(max_lag), QueueState())
        self.flying: list[Ticket] = []

    @property
    def ahead(self) -> int:
        return self.rules.state.needed.lag

    def issue(self) -> int:
        """Take every ticket; returns their number."""
        tickets = self.rules.issue("a", self.rules.state.version, 1000, next(CALLS))
        self.flying += tickets
        return len(tickets)

    def finish(self, count: int) -> None:
        """End the oldest `count` completions in flight."""
        ended, self.flying = self.flying[:count], self.flying[count:]
        assert len(ended) == count
        version = self.rules.state.version
        for ticket in ended:
            self.rules.put([structs.replace(trajectory([5], versions=(version,)), identity=ticket.identity)])

    def take(self, version: int) -> None:
        while self.rules.take(version) is None:
            self.finish(1)

    def update(self, left_over: int | None) -> None:
        """Publish the next version: the learner waits for its batch (None), or has it and leaves so many batches."""
        version = self.rules.state.version
        self.take(version)
        if left_over is not None:
            self.take(version + 1)
            self.finish(max(0, left_over * BATCH - self.rules.state.ready_units))
            assert self.rules.state.ready_units == left_over * BATCH
        self.rules.publish(version + 1)


def rose_to(most: int) -> HandRun:
    """A run whose learner has waited until `most` versions were admitted."""
    made = HandRun()
    while made.ahead < most:
        made.issue()
        made.update(None)
    return made


def test_it_begins_at_one_and_doubles_while_the_learner_waits_and_all_slots_are_taken() -> None:
    made, admitted = HandRun(), [1]
    assert made.issue() == 2 * BATCH
    for _ in range(14):
        made.update(None)
        admitted.append(made.ahead)
        made.issue()
        assert made.rules.state.held == (made.ahead + 1) * BATCH
    assert admitted == [1, 3, 3, 7, 7, 7, 7, *[15] * 8], "each time, its slots have half of it to arrive"


def test_it_stays_where_engines_leave_slots_open() -> None:
    made = HandRun()
    made.flying += made.rules.issue("a", 0, BATCH, next(CALLS))
    made.update(None)
    assert made.ahead == 1, "the engines are too slow: more slots would change nothing"


def test_batches_that_are_always_left_over_are_admitted_no_more() -> None:
    made, seen = rose_to(3), list[int]()
    for left_over in (1, 2, 1, 1):
        made.issue()
        made.update(left_over)
        seen.append(made.ahead)
    assert seen == [3, 3, 3, 2], "one whole batch was left over each time"


def test_one_version_with_less_than_a_batch_left_over_keeps_the_lag() -> None:
    made = rose_to(3)
    for left_over in (2, 1, 0, 1):
        made.issue()
        made.update(left_over)
    assert made.ahead == 3


def test_after_a_fall_nothing_is_measured_until_the_surplus_is_used_up_and_it_rises_by_one() -> None:
    made = rose_to(7)
    for _ in range(8):
        made.issue()
        made.update(5)
    assert made.ahead == 2
    for left_over in (4, 3, 2, 1):
        assert made.issue() == 0, "more than ahead + 1 batches are held"
        made.update(left_over)
        assert made.ahead == 2
    made.issue()
    made.update(None)
    assert made.ahead == 3
    for _ in range(2 * (3 + 1)):
        assert made.ahead == 3, "a fall that had to be taken back makes the next one twice as slow"
        made.issue()
        made.update(1)
    assert made.ahead == 2


def test_patience_has_a_bound() -> None:
    made = NeededLag(lag=4, has_fallen=True)
    for _ in range(9):
        made.since_rise = 4
        made.follow(None, is_full=True, has_surplus=False, at_most=99)
    assert made.patience == 8


@pytest.mark.parametrize("max_lag", [1, 2])
def test_a_small_bound_is_never_exceeded(max_lag: int) -> None:
    made = HandRun(max_lag)
    for _ in range(6):
        made.issue()
        assert made.rules.state.held <= (max_lag + 1) * BATCH
        made.update(None)
    assert made.ahead == max_lag


def test_a_queue_that_died_goes_on_with_what_was_needed() -> None:
    made = rose_to(7)
    changes = snapshot.take_changes(made.rules.settings, made.rules.state)
    saved = Changes(decode(encode(changes.counters), Counters), (), ())
    again = snapshot.rebuild_state(made.rules.settings, saved, Path("runs/a/journal.sqlite"))
    assert again.needed.lag == 7


def test_what_the_learner_admits_bounds_it() -> None:
    chosen = settings()._replace(first_lag=1)
    assert [chosen.admitted_lag(4, 9), chosen.admitted_lag(12, 9), chosen.admitted_lag(None, 9)] == [4, 9, 1]
    assert settings(as_needed=False).admitted_lag(None, 1) == 16


@pytest.mark.parametrize(
    ("overrides", "follows"),
    [
        ((), True),
        (("queue.ahead=max_lag",), False),
        (("queue.max_lag=0",), False),
        (("queue.max_lag=4", "queue.segments={}"), False),
        (("queue.too_old=keep", "queue.admission=mean"), True),
        (("queue.max_lag=8", "queue.too_old=windowed"), True),
    ],
)
def test_which_configurations_follow_the_need(overrides: Sequence[str], follows: bool) -> None:
    assert queue_settings(configfile.load(CONFIG, overrides)).as_needed is follows


# --- in simulated time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize(("rate", "reward_s"), [(0.7, 1.0), (3.0, 0.0), (3.0, 10.0)])
def test_updates_are_as_quick_as_at_the_full_lag_on_younger_data(rate: float, reward_s: float, engines: int) -> None:
    row = study.case("lognormal", rate, reward_s, 16, engines, updates=60)
    assert row["needed updates/s"] > 0.98 * row["full updates/s"]
    if rate > 1:
        assert row["full lag"] > 14, "the learner is slower than its engines"
        assert row["needed lag"] < 4 + reward_s
    assert row["needed lost"] <= row["full lost"] + 0.01
