"""The rules for whole completions in one world: engines with heavy-tailed lengths, swaps that come late, a learner.

Time goes by in ticks: a token for every running completion, and `UPDATE` ticks for an update. So the rules can be told
apart by what they promise and by what they cost: the greatest lag, the mean lag, tokens that nobody trains on, ticks in
which the learner waits. `python tests/property/test_rules_of_age.py` prints the table of benchmarks/results/notes.md.
"""

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from conftest import trajectory
from msgspec import structs

from streamppo.config.queue import Queue
from streamppo.queue import report
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import QueueSettings, QueueState
from streamppo.types import Identity, ints

BATCH = 8
UPDATE = 6
"""Ticks of one update: two engines with `ROOM` sample a little more than a learner without a pause takes."""
ROOM = 16
TICKS = 4000
LONGEST = 400
RULES = ("mask", "drop", "wait", "windowed", "keep")


@dataclass(eq=False)
class Running:
    """One completion: the versions of its tokens."""

    identity: Identity
    length: int
    versions: list[int] = field(default_factory=list[int])


@dataclass(eq=False)
class Engine:
    """An engine of some version, and what it samples."""

    name: str
    version: int = 0
    running: list[Running] = field(default_factory=list[Running])
    calls: Any = field(default_factory=itertools.count)


class Outcome(NamedTuple):
    """The numbers of one world: lags of trained tokens, updates from the beginning of a completion to its own; shares
    of ticks in which the learner waited and of tokens that nobody trains on; the mean length."""

    lags: list[int]
    ages: list[int]
    waited: float
    lost: float
    length: float


def settings(too_old: Any, max_lag: int, size: int) -> QueueSettings:
    admission = "mean" if too_old == "keep" else "engine"
    queue = Queue(batch_size=BATCH, max_lag=max_lag, too_old=too_old, admission=admission)
    hard = too_old != "keep"
    return QueueSettings("t", BATCH, size, max_lag, queue.flow_lag, size > 1, too_old, 50, 1.0, hard=hard)


class World:
    """The queue, two engines and a learner that fetches its next batch while it trains."""

    def __init__(self, seed: int, chosen: QueueSettings, *, deaths: float = 0.0) -> None:
        """Where the admitted lag is steered, the learner tells one at random with every version."""
        self.draw, self.deaths = random.Random(seed), deaths
        self.rules = QueueRules(chosen, QueueState())
        self.names = itertools.count()
        self.engines = [self.engine(), self.engine()]
        self.lags: list[int] = []
        self.ages: list[int] = []
        self.begun: dict[Identity, int] = {}
        self.lengths: list[int] = []
        self.left = self.waited = 0

    def engine(self) -> Engine:
        return Engine(f"actor-{next(self.names)}", self.rules.state.version)

    def tick(self) -> None:
        for engine in list(self.engines):
            self.sample(engine)
            if self.draw.random() < 0.5:
                engine.version = self.rules.state.version
            if self.draw.random() < self.deaths:
                self.rules.mark_dead(engine.name)
                self.engines = [one for one in self.engines if one is not engine] + [self.engine()]
        self.learn()

    def sample(self, engine: Engine) -> None:
        room = ROOM - len(engine.running)
        for ticket in self.rules.issue(engine.name, engine.version, room, next(engine.calls)) if room else ():
            length = min(LONGEST, int(self.draw.paretovariate(1.1)))
            engine.running.append(Running(ticket.identity, length))
            self.begun[ticket.identity] = self.rules.state.version
        for one in engine.running:
            one.versions.append(engine.version)
            if len(one.versions) == one.length:
                made = trajectory([5] * one.length, versions=tuple(one.versions))
                self.rules.put([structs.replace(made, identity=one.identity, actor=engine.name)])
        engine.running = [one for one in engine.running if len(one.versions) < one.length]

    def learn(self) -> None:
        version = self.rules.state.version
        if self.left:
            self.left -= 1
            self.rules.take(version + 1)
            if self.left == 0:
                is_steered = self.rules.settings.first_lag is not None
                self.rules.publish(version + 1, self.draw.randint(0, 9) if is_steered else None)
        elif self.rules.take(version) is not None:
            self.left = UPDATE
            self.train(version)
        else:
            self.waited += 1

    def train(self, version: int) -> None:
        batch = self.rules.leased_batch(version)
        for one in batch.trajectories:
            versions = ints(one.versions).tolist()
            self.lags += [version - sampled for sampled in versions if sampled >= batch.min_version]
            self.ages.append(version - self.begun[one.identity])
            self.lengths.append(len(versions))

    def outcome(self) -> Outcome:
        queue = report.report(self.rules.state)
        lost = queue.masked_tokens + queue.tokens["too_old"]
        share, length = lost / queue.tokens["delivered"], statistics.mean(self.lengths)
        return Outcome(self.lags, self.ages, self.waited / TICKS, share, length)


def world(too_old: str, max_lag: int, seed: int, *, size: int = 1, deaths: float = 0.0, ticks: int = TICKS) -> Outcome:
    made = World(seed, settings(too_old, max_lag, size), deaths=deaths)
    for _ in range(ticks):
        made.tick()
    return made.outcome()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("max_lag", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2])
def test_a_window_bounds_every_token_and_drops_none_also_where_actors_die(max_lag: int, size: int) -> None:
    chosen = settings("windowed", max_lag, size)
    units, window = chosen.batch_units, chosen.window
    assert window is not None
    assert chosen.flow_lag + -(-(window - 1) // units) == max_lag, "S + ceil((W - 1) / P)"
    for seed in range(3):
        outcome = world("windowed", max_lag, seed, size=size, deaths=0.01, ticks=1500)
        assert outcome.lost == 0
        assert max(outcome.lags) <= max_lag
        assert len(outcome.ages) > 20 * BATCH


@pytest.mark.parametrize("too_old", ["wait", "windowed", "mask"])
def test_a_lag_that_is_steered_at_random_keeps_the_hard_bound_and_batches_come(too_old: str) -> None:
    for seed in range(3):
        made = World(seed, settings(too_old, 6, 1)._replace(first_lag=1), deaths=0.01)
        for _ in range(1500):
            made.tick()
        outcome = made.outcome()
        assert max(outcome.lags) <= 6
        assert outcome.lost == 0 or too_old == "mask"
        assert len(outcome.ages) > 20 * BATCH


@pytest.mark.slow
def test_a_window_is_used_to_its_end() -> None:
    lags = [lag for seed in range(3) for lag in world("windowed", 4, seed).lags]
    assert max(lags) == 4 > settings("windowed", 4, 1).flow_lag


@pytest.mark.slow
def test_the_rules_differ_in_how_long_the_learner_waits_and_in_what_they_lose() -> None:
    outcomes = {rule: [world(rule, 8, seed) for seed in range(3)] for rule in RULES}
    waited = {rule: statistics.mean(one.waited for one in some) for rule, some in outcomes.items()}
    lost = {rule: statistics.mean(one.lost for one in some) for rule, some in outcomes.items()}
    assert waited["mask"] < waited["windowed"] < waited["wait"]
    assert lost["wait"] == lost["windowed"] == lost["keep"] == 0 < lost["mask"] < lost["drop"]
    for rule in ("mask", "drop", "wait", "windowed"):
        assert max(max(one.lags) for one in outcomes[rule]) <= 8


@pytest.mark.slow
def test_admission_by_the_mean_bounds_the_mean_age_of_completions_and_no_single_one() -> None:
    for seed in range(3):
        outcome = world("keep", 4, seed)
        assert statistics.mean(outcome.ages) <= 4
        assert max(outcome.lags) > 4 * 4
        assert outcome.lost == 0


def table(max_lags: Sequence[int], seeds: Sequence[int]) -> None:
    """Print the numbers of every rule, means over `seeds`; the greatest lag is that of all of them."""
    print("| max_lag | rule | greatest lag | mean lag | tokens lost | learner waits | mean length |")
    for max_lag, rule in itertools.product(max_lags, RULES):
        some = [world(rule, max_lag, seed) for seed in seeds]
        lags = [lag for one in some for lag in one.lags]
        waits, lost, length = (statistics.mean(getattr(one, name) for one in some) for name in Outcome._fields[2:])
        row = f"{max(lags)} | {statistics.mean(lags):.1f} | {lost:.1%} | {waits:.1%} | {length:.2f}"
        print(f"| {max_lag} | {rule} | {row} |")


if __name__ == "__main__":
    table((1, 4, 8), range(5))
