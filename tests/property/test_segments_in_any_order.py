"""Segments through the queue's rules, against engines, a learner and crashes that come in any order.

An engine hands over segments by the protocol of `Cuts`; everything else is drawn. Checked: every token of every attempt
that came to its end is trained on exactly once and in order, none is too old, none is masked, and no order of events
keeps the next batch from coming.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from conftest import trajectory
from msgspec import structs

from streamppo.config.queue import Queue, Segments
from streamppo.queue import report
from streamppo.queue.rules.records import Changes, Lease, SavedSlot
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.slot import SlotState
from streamppo.queue.rules.state import QueueSettings, QueueState
from streamppo.queue.store import snapshot
from streamppo.rollout.segment_cuts import cut_for, due, max_in_flight, newest_version_start
from streamppo.types import Batch, Failure, Identity, Trajectory, decode, encode, flags, ints

BATCH = 4
SHARE = BATCH / 2
"""The segments of a batch that one of two actors makes."""
ROOM = 9


@dataclass(eq=False)
class Running:
    """One completion: the versions of its tokens, and how many were handed over."""

    identity: Identity
    length: int
    versions: list[int] = field(default_factory=list[int])
    handed: int = 0

    @property
    def oldest(self) -> int:
        """The version of the first token that was not handed over."""
        return self.versions[self.handed]

    def hand_over(self, actor: str, finish: str, *, keep: int = 0) -> Trajectory:
        """The next segment, but for `keep` tokens; tokens are numbered, so that their order can be told."""
        end = len(self.versions) - keep
        made = trajectory(list(range(self.handed + 1, end + 1)), versions=tuple(self.versions[self.handed : end]))
        segment = structs.replace(made, identity=self.identity, actor=actor, finish=finish, prefix=self.handed)
        self.handed = end
        self.identity = structs.replace(self.identity, segment=self.identity.segment + 1)
        return segment


class Actor:
    """An engine by the protocol of `Cuts`, completions that wait for their reward, and what is to be delivered next."""

    def __init__(self, name: str, version: int, queue: Queue) -> None:
        self.name, self.version, self.queue = name, version, queue
        self.running: list[Running] = []
        self.unscored: list[Running] = []
        self.pending: list[Trajectory | Failure] = []
        self.calls = itertools.count()

    def sample(self) -> None:
        """A token for every running completion."""
        for one in self.running:
            one.versions.append(self.version)
        self.unscored += [one for one in self.running if len(one.versions) == one.length]
        self.running = [one for one in self.running if len(one.versions) < one.length]

    def score(self, count: int) -> None:
        """Rewards come for the first `count` that wait for one."""
        scored, self.unscored = self.unscored[:count], self.unscored[count:]
        self.pending += [one.hand_over(self.name, "stop") for one in scored]

    def cut_by_length(self, most: int) -> None:
        self.pending += [
            one.hand_over(self.name, "cut") for one in self.running if most and len(one.versions) - one.handed >= most
        ]

    def swap(self, version: int, admitted: int | None) -> None:
        waiting = [one for one in self.running if len(one.versions) > one.handed]
        ages = [version - one.oldest for one in waiting]
        places = due(ages, self.queue.cut_age, SHARE, self.queue.aim(admitted))
        self.pending += [waiting[place].hand_over(self.name, "cut") for place in places]
        self.version = version

    def cut_unscored(self) -> int:
        """Cut those that are due, but for tokens of the newest version; returns the version for which all is cut."""
        for one in self.unscored:
            keep = newest_version_start(np.array(one.versions))
            if keep > one.handed and self.version - one.oldest >= self.queue.cut_age:
                self.pending.append(one.hand_over(self.name, "cut", keep=len(one.versions) - keep))
        return cut_for(self.version, [one.oldest for one in self.unscored], self.queue.flow_lag)

    def fail(self, one: Running) -> None:
        (self.running if one in self.running else self.unscored).remove(one)
        self.pending.append(Failure(identity=one.identity, actor=self.name, stage="reward", reason="no"))


class World:
    """The queue, two actors, and a learner."""

    def __init__(
        self, seed: int, max_lag: int, max_tokens: int, *, slow_rewards: bool = False, steered: bool = False
    ) -> None:
        self.draw = random.Random(seed)
        segments = Segments(max_tokens=max_tokens)
        self.queue = Queue(batch_size=BATCH, max_lag=max_lag, too_old="mask", segments=segments)
        lags, first = (max_lag, self.queue.flow_lag), 1 if steered else None
        self.settings = QueueSettings("t", BATCH, 1, *lags, False, "mask", 50, 1.0, segments=segments, first_lag=first)
        self.admitted = first
        self.slow_rewards = slow_rewards
        self.rules = QueueRules(self.settings, QueueState())
        self.max_tokens = max_tokens
        self.names = itertools.count()
        self.actors = [self.new_actor(), self.new_actor()]
        self.taken: dict[int, Batch] = {}
        self.disk: dict[tuple[int, int], bytes] = {}
        self.leases: dict[int, bytes] = {}
        self.trained: list[tuple[int, Trajectory]] = []
        self.failed: set[tuple[int, int, int]] = set()

    def new_actor(self) -> Actor:
        return Actor(f"actor-{next(self.names)}", self.rules.state.version, self.queue)

    def issue(self, actor: Actor) -> None:
        most = min(ROOM, max_in_flight(self.queue.cut_age, SHARE))
        room = most - len(actor.running) - len(actor.unscored)
        for ticket in self.rules.issue(actor.name, actor.version, room, next(actor.calls)) if room else ():
            length = int(self.draw.paretovariate(0.8))
            actor.running.append(Running(ticket.identity, min(60, length)))

    def deliver(self, actor: Actor) -> None:
        cut_for = actor.cut_unscored()
        pending, actor.pending = actor.pending, []
        self.rules.put([one for one in pending if isinstance(one, Trajectory)])
        for one in pending:
            if isinstance(one, Failure):
                self.failed.add((one.identity.prompt, one.identity.sample, one.identity.attempt))
                self.rules.fail(one)
        self.rules.cut_for(actor.name, cut_for)

    def lose(self, actor: Actor) -> None:
        for one in (*actor.running, *actor.unscored, *actor.pending):
            self.failed.add((one.identity.prompt, one.identity.sample, one.identity.attempt))
        self.rules.mark_dead(actor.name)
        self.actors = [one for one in self.actors if one is not actor] + [self.new_actor()]

    def take(self) -> None:
        """The batch of the update that runs, or the one behind it, as a learner that prefetches asks for it."""
        version = self.rules.state.version
        wanted = version if version not in self.taken else version + 1
        if wanted in self.taken or (batch := self.rules.take(wanted)) is None:
            return
        self.taken[wanted] = batch
        for one in batch.trajectories:
            newest = int(ints(one.versions)[flags(one.mask)].max())
            assert newest >= batch.min_version == wanted - self.settings.max_lag, "all of it is too old"
            self.trained.append((wanted, one))

    def publish(self) -> None:
        version = self.rules.state.version
        if self.taken.pop(version, None):
            self.rules.publish(version + 1, self.steer())

    def steer(self) -> int | None:
        """The lag that is admitted falls to anything, and rises by 1, as the learner's rule has it."""
        if self.admitted is not None:
            falls, rises = self.draw.random() < 0.15, self.draw.random() < 0.8
            self.admitted = self.draw.randint(0, self.admitted) if falls else self.admitted + rises
            self.admitted = min(self.admitted, self.settings.flow_lag)
        return self.admitted

    def crash(self) -> None:
        """The queue is rebuilt from its journal; what it was told by actors since they began is lost."""
        changes = snapshot.take_changes(self.settings, self.rules.state)
        self.disk |= {(one.number, one.part): encode(one) for one in changes.slots}
        self.leases |= {one.version: encode(one) for one in changes.leases}
        for place in changes.removed:
            self.disk.pop(place, None)
        self.leases = {version: row for version, row in self.leases.items() if version >= changes.counters.version}
        slots = tuple(decode(self.disk[place], SavedSlot) for place in sorted(self.disk))
        leases = tuple(decode(row, Lease) for _, row in sorted(self.leases.items()))
        state = snapshot.rebuild_state(self.settings, Changes(changes.counters, slots, leases), Path("journal"))
        self.rules = QueueRules(self.settings, state)

    def anything(self) -> None:
        actor = self.draw.choice(self.actors)
        event = self.draw.choices(
            ["issue", "sample", "cut", "swap", "deliver", "fail", "lose", "take", "publish", "crash", "score"],
            [6, 12, 4, 4, 6, 0.5, 0.2, 6, 3, 0.5, 4 if self.slow_rewards else 0],
        )[0]
        if not self.slow_rewards:
            actor.score(ROOM)
        if event == "fail":
            if under_way := [*actor.running, *actor.unscored]:
                actor.fail(self.draw.choice(under_way))
        elif event in ("issue", "deliver", "lose"):
            getattr(self, event)(actor)
        elif event == "sample":
            actor.sample()
        elif event == "cut":
            actor.cut_by_length(self.max_tokens)
        elif event == "swap":
            actor.swap(self.rules.state.version, self.rules.state.admitted_lag)
        elif event == "score":
            actor.score(self.draw.randint(1, ROOM))
        else:
            getattr(self, event)()
        slots = self.rules.state.slots.values()
        assert self.rules.state.issued == Counter(one.actor for one in slots if one.state is SlotState.ISSUED), event

    def in_turn(self) -> None:
        """Everybody does one thing."""
        for actor in self.actors:
            self.issue(actor)
            actor.sample()
            actor.swap(self.rules.state.version, self.rules.state.admitted_lag)
            if not self.slow_rewards or self.draw.random() < 0.3:
                actor.score(ROOM)
            self.deliver(actor)
        self.take()
        self.publish()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("max_lag", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 25), marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_token_grows_too_old_and_each_is_trained_on_once_whatever_the_order(
    seeds: range, max_lag: int, steered: bool
) -> None:
    for seed in seeds:
        world = in_any_order(seed, max_lag, 0, steered=steered)
        counted = report.report(world.rules.state)
        assert counted.masked_tokens == 0 and counted.dropped["too_old"] == 0, f"seed {seed}: tokens grew too old"


@pytest.mark.slow
@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("max_lag", [1, 2, 5])
def test_the_learner_waits_for_rewards_before_tokens_grow_too_old(max_lag: int, steered: bool) -> None:
    masked = given_up = consumed = 0
    for seed in range(25):
        world = in_any_order(seed, max_lag, 0, slow_rewards=True, steered=steered)
        counted = report.report(world.rules.state)
        masked, given_up = masked + counted.masked_tokens, given_up + counted.dropped["too_old"]
        consumed += counted.consumed
    # Rewards that come all at once may bring more than a batch has room for.
    bound = 0 if max_lag < 3 else consumed / 500
    assert masked + given_up <= bound, f"{masked} tokens masked, {given_up} of {consumed} segments too old"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("max_lag", [1, 9])
def test_segments_by_length_are_whole_too_and_next_to_none_grow_too_old(max_lag: int) -> None:
    lost = consumed = 0
    for seed in range(12):
        counted = report.report(in_any_order(seed, max_lag, 3).rules.state)
        lost, consumed = lost + counted.masked_tokens + counted.tokens["too_old"], consumed + counted.tokens["consumed"]
    # At a lag of 1 a version is all the time there is, and hostile orders take longer.
    bound = 0.01 if max_lag == 1 else 0.002
    assert lost <= bound * consumed, f"{lost} of {consumed} tokens were too old"


def in_any_order(
    seed: int, max_lag: int, max_tokens: int, *, slow_rewards: bool = False, steered: bool = False
) -> World:
    """Events in an order that is drawn, and then in turn: batches must come again, and segments be whole."""
    world = World(seed, max_lag, max_tokens, slow_rewards=slow_rewards, steered=steered)
    for _ in range(500):
        world.anything()
    tokens = dict(report.report(world.rules.state).tokens)
    assert tokens.pop("delivered") == sum(tokens.values())
    before = world.rules.state.version
    for _ in range(200):
        world.in_turn()
    # With an admitted lag of 0 an update takes as long as the longest completion of its batch.
    least = 8 if steered else 20
    assert world.rules.state.version >= before + least, f"seed {seed}: batches stopped coming"
    check_that_segments_are_whole(world)
    return world


def check_that_segments_are_whole(world: World) -> None:
    """Sorted by segment, the tokens of an attempt that ended well are 1, 2, ...; of others they begin so."""
    attempts: dict[tuple[int, int, int], list[Trajectory]] = {}
    for _, one in world.trained:
        attempts.setdefault((one.identity.prompt, one.identity.sample, one.identity.attempt), []).append(one)
    ended = 0
    for name, segments in attempts.items():
        segments.sort(key=lambda one: one.identity.segment)
        numbers = [token for one in segments for token in ints(one.tokens).tolist()]
        assert len({one.identity.segment for one in segments}) == len(segments), name
        if segments[-1].finish == "stop" and segments[-1].identity.segment == len(segments) - 1:
            # None of them grew too old: all are here.
            assert numbers == list(range(1, len(numbers) + 1)), name
            assert segments[-1].prefix + segments[-1].num_tokens == len(numbers)
            ended += 1
    assert ended > 20
