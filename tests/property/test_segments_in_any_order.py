"""Segments through the queue's rules, against engines, a learner and crashes that come in any order.

An engine hands over segments by the protocol of `Cuts`; everything else is drawn. Checked: every token of every attempt
that came to its end is trained on exactly once and in order, none is too old, none is masked, and no order of events
keeps the next batch from coming.
"""

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import trajectory
from msgspec import structs

from streamppo.config.queue import Queue, Segments
from streamppo.queue import report, snapshot
from streamppo.queue.records import Lease, Saved, SavedSlot
from streamppo.queue.rules import QueueRules
from streamppo.queue.state import QueueState, Settings
from streamppo.rollout.cuts import due
from streamppo.types import Batch, Failure, Identity, Trajectory, decode, encode, flags, ints

BATCH = 4
ROOM = 9


@dataclass(eq=False)
class Running:
    """One completion: the versions of its tokens, and how many were handed over."""

    identity: Identity
    length: int
    versions: list[int] = field(default_factory=list[int])
    handed: int = 0

    def hand_over(self, actor: str, finish: str) -> Trajectory:
        """The next segment; its tokens are numbered, so that their order can be told."""
        tokens = list(range(self.handed + 1, len(self.versions) + 1))
        made = trajectory(tokens, versions=tuple(self.versions[self.handed :]))
        segment = structs.replace(made, identity=self.identity, actor=actor, finish=finish, prefix=self.handed)
        self.handed = len(self.versions)
        self.identity = structs.replace(self.identity, segment=self.identity.segment + 1)
        return segment


class Actor:
    """An engine by the protocol of `Cuts`, and what waits for its next delivery."""

    def __init__(self, name: str, version: int) -> None:
        self.name, self.version = name, version
        self.running: list[Running] = []
        self.pending: list[Trajectory | Failure] = []
        self.calls = itertools.count()

    def sample(self) -> None:
        """A token for every running completion."""
        for one in self.running:
            one.versions.append(self.version)
            if len(one.versions) == one.length:
                self.pending.append(one.hand_over(self.name, "stop"))
        self.running = [one for one in self.running if len(one.versions) < one.length]

    def cut_by_length(self, most: int) -> None:
        self.pending += [
            one.hand_over(self.name, "cut") for one in self.running if most and len(one.versions) - one.handed >= most
        ]

    def swap(self, version: int, age: int) -> None:
        waiting = [one for one in self.running if len(one.versions) > one.handed]
        ages = [version - one.versions[one.handed] for one in waiting]
        self.pending += [waiting[place].hand_over(self.name, "cut") for place in due(ages, age, BATCH / 2)]
        self.version = version

    def fail(self, one: Running) -> None:
        self.running.remove(one)
        self.pending.append(Failure(identity=one.identity, actor=self.name, stage="reward", reason="no"))


class World:
    """The queue, two actors, and a learner."""

    def __init__(self, seed: int, max_lag: int, max_tokens: int) -> None:
        self.draw = random.Random(seed)
        segments = Segments(max_tokens=max_tokens)
        queue = Queue(batch_size=BATCH, max_lag=max_lag, too_old="mask", segments=segments)
        self.cut_age = queue.cut_age
        self.settings = Settings(
            "t", BATCH, 1, max_lag, False, "mask", 50, 1.0, segments=segments, flow_lag=queue.flow_lag
        )
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
        return Actor(f"actor-{next(self.names)}", self.rules.state.version)

    def issue(self, actor: Actor) -> None:
        room = ROOM - len(actor.running)
        for ticket in self.rules.issue(actor.name, actor.version, room, next(actor.calls)) if room else ():
            length = int(self.draw.paretovariate(0.8))
            actor.running.append(Running(ticket.identity, min(60, length)))

    def deliver(self, actor: Actor) -> None:
        pending, actor.pending = actor.pending, []
        self.rules.put_all([one for one in pending if isinstance(one, Trajectory)])
        for one in pending:
            if isinstance(one, Failure):
                self.failed.add((one.identity.prompt, one.identity.sample, one.identity.attempt))
                self.rules.fail(one)
        self.rules.cut_for(actor.name, actor.version)

    def lose(self, actor: Actor) -> None:
        for one in actor.running:
            self.failed.add((one.identity.prompt, one.identity.sample, one.identity.attempt))
        for one in actor.pending:
            self.failed.add((one.identity.prompt, one.identity.sample, one.identity.attempt))
        self.rules.lost(actor.name)
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
            self.rules.publish(version + 1)

    def crash(self) -> None:
        """The queue is rebuilt from its journal; what it was told by actors since they began is lost."""
        changes = snapshot.drain(self.settings, self.rules.state)
        self.disk |= {(one.number, one.part): encode(one) for one in changes.slots}
        self.leases |= {one.version: encode(one) for one in changes.leases}
        for place in changes.gone:
            self.disk.pop(place, None)
        self.leases = {version: row for version, row in self.leases.items() if version >= changes.counters.version}
        slots = tuple(decode(self.disk[place], SavedSlot) for place in sorted(self.disk))
        leases = tuple(decode(row, Lease) for _, row in sorted(self.leases.items()))
        state = snapshot.rebuild(self.settings, Saved(changes.counters, slots, leases), Path("journal"))
        self.rules = QueueRules(self.settings, state)

    def anything(self) -> None:
        actor = self.draw.choice(self.actors)
        event = self.draw.choices(
            ["issue", "sample", "cut", "swap", "deliver", "fail", "lose", "take", "publish", "crash"],
            [6, 12, 4, 4, 6, 0.5, 0.2, 6, 3, 0.5],
        )[0]
        if event == "fail":
            if actor.running:
                actor.fail(self.draw.choice(actor.running))
        elif event in ("issue", "deliver", "lose"):
            getattr(self, event)(actor)
        elif event == "sample":
            actor.sample()
        elif event == "cut":
            actor.cut_by_length(self.max_tokens)
        elif event == "swap":
            actor.swap(self.rules.state.version, self.cut_age)
        else:
            getattr(self, event)()

    def in_turn(self) -> None:
        """Everybody does one thing."""
        for actor in self.actors:
            self.issue(actor)
            actor.sample()
            actor.swap(self.rules.state.version, self.cut_age)
            self.deliver(actor)
        self.take()
        self.publish()


@pytest.mark.parametrize("max_lag", [1, 2, 3, 5])
def test_no_token_grows_too_old_and_each_is_trained_on_once_whatever_the_order(max_lag: int) -> None:
    for seed in range(25):
        world = in_any_order(seed, max_lag, 0)
        counted = report.report(world.rules.state)
        assert counted.masked_tokens == 0 and counted.dropped["too_old"] == 0, f"seed {seed}: tokens grew too old"


@pytest.mark.parametrize("max_lag", [1, 4])
def test_segments_by_length_are_whole_too_and_those_that_grow_too_old_are_counted(max_lag: int) -> None:
    for seed in range(12):
        in_any_order(seed, max_lag, 3)


def in_any_order(seed: int, max_lag: int, max_tokens: int) -> World:
    """Events in an order that is drawn, and then in turn: batches must come again, and segments be whole."""
    world = World(seed, max_lag, max_tokens)
    for _ in range(500):
        world.anything()
    tokens = dict(report.report(world.rules.state).tokens)
    assert tokens.pop("delivered") == sum(tokens.values())
    before = world.rules.state.version
    for _ in range(200):
        world.in_turn()
    assert world.rules.state.version >= before + 20, f"seed {seed}: batches stopped coming"
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
