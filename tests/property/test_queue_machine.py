"""Every order of events, against a model that only remembers what it saw.

Engines of different versions, failures, actors that die, zombies that deliver late, deliveries twice, prefetch,
requests whose answer is lost, and a queue that dies between any two calls and is rebuilt from what it had written down.
"""

from pathlib import Path
from typing import Any

from conftest import trajectory
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamppo.config.correction import Curriculum
from streamppo.config.queue import Queue
from streamppo.errors import QueueError
from streamppo.queue import report
from streamppo.queue.rules.records import GIVEN_UP, Changes, EndedAttempt, KnownRows, Lease, SavedSlot
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.slot import TrajectoryRecord, make_record
from streamppo.queue.rules.state import QueueSettings, QueueState
from streamppo.queue.store import snapshot
from streamppo.tasks.order import RowNumbers, SourceRows
from streamppo.types import Batch, Failure, Identity, QueueReport, Ticket, Trajectory, decode, encode, ints

ACTORS = ["a", "b", "c"]
ROWS = RowNumbers(sources=(SourceRows(name="rows", weight=1.0, count=3, key=(1,)),), seed=1)
"""Few rows, so that a curriculum soon skips prompts: all groups have equal rewards."""


class Disk:
    """The journal as a dictionary: rows as bytes, changes applied in the journal's order."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], bytes] = {}
        self.leases: dict[int, bytes] = {}
        self.ended: dict[Identity, EndedAttempt] = {}
        self.zero_variance: dict[int, int] = {}
        self.skipped: dict[int, int] = {}
        self.rows: KnownRows | None = None

    def write(self, changes: Changes) -> None:
        self.counters = changes.counters
        self.slots |= {(slot.number, slot.part): encode(slot) for slot in changes.slots}
        self.leases |= {lease.version: encode(lease) for lease in changes.leases}
        for one in changes.ended:
            assert one.identity not in self.ended, "an attempt ended twice"
            self.ended[one.identity] = one
        self.zero_variance |= dict(changes.zero_variance)
        assert not self.skipped.keys() & dict(changes.skipped).keys(), "a prompt was skipped twice"
        self.skipped |= dict(changes.skipped)
        self.rows = changes.rows or self.rows
        for place in changes.removed:
            self.slots.pop(place, None)
        for version in [version for version in self.leases if version < self.counters.version]:
            del self.leases[version]

    def read(self) -> Changes:
        slots = tuple(decode(self.slots[place], SavedSlot) for place in sorted(self.slots))
        leases = tuple(decode(self.leases[version], Lease) for version in sorted(self.leases))
        return Changes(self.counters, slots, leases, zero_variance=tuple(self.zero_variance.items()), rows=self.rows)


class QueueMachine(RuleBasedStateMachine):
    """`consumed` and `seen` are the whole model: what was trained on, and every ticket ever issued."""

    @initialize(
        max_lag=st.integers(0, 3),
        whole_groups=st.booleans(),
        too_old=st.sampled_from(["mask", "drop", "wait", "windowed", "keep"]),
        max_attempts=st.integers(1, 3),
        records=st.booleans(),
        skips=st.booleans(),
        as_needed=st.booleans(),
    )
    def begin(
        self,
        *,
        max_lag: int,
        whole_groups: bool,
        too_old: Any,
        max_attempts: int,
        records: bool,
        skips: bool,
        as_needed: bool,
    ) -> None:
        self.records, self.skips, self.as_needed = records, skips and whole_groups, as_needed
        self.max_lag, self.whole_groups, self.too_old = max_lag, whole_groups, too_old
        self.max_attempts = max_attempts
        self.config = Queue(
            batch_size=4,
            max_lag=max_lag,
            too_old=too_old,
            samples_per_prompt=2,
            admission="mean" if too_old == "keep" else "engine",
        )
        self.queue = QueueRules(self._settings(), QueueState())
        if self.queue.curriculum:
            self.queue.curriculum.map_rows(ROWS)
        self.disk = Disk()
        self.lives = dict.fromkeys(ACTORS, 0)
        self.calls = dict.fromkeys(ACTORS, 0)
        self.engines = dict.fromkeys(ACTORS, 0)
        self.flying: dict[Identity, tuple[str, Ticket, list[int]]] = {}
        self.delivered: list[Trajectory] = []
        self.zombies: list[Trajectory] = []
        self.leases: dict[int, Batch] = {}
        self.consumed: dict[tuple[int, int], int] = {}
        self.failures: dict[tuple[int, int], int] = {}
        self.trained: set[Identity] = set()
        self.tokens_delivered = self.tokens_consumed = 0
        self.seen: set[Identity] = set()

    # --- rollout -----------------------------------------------------------------------------------------

    @rule(actor=st.sampled_from(ACTORS), limit=st.integers(1, 6))
    def issue(self, actor: str, limit: int) -> None:
        tickets = self._ask(actor, limit)
        assert self._ask(actor, limit) == tickets or not tickets, "the same request got other tickets"
        self.calls[actor] += bool(tickets)
        for ticket in tickets:
            assert ticket.identity not in self.seen, "an identity was issued twice"
            self.seen.add(ticket.identity)
            self.flying[ticket.identity] = (actor, ticket, [])

    @rule(actor=st.sampled_from(ACTORS), limit=st.integers(1, 6))
    def answer_is_lost(self, actor: str, limit: int) -> None:
        """The actor does not count up, and gets the same tickets when it asks again, also from a new queue."""
        tickets = self._ask(actor, limit)
        self.crash()
        assert not tickets or self._ask(actor, limit) == tickets, "tickets were lost with their answer"
        self.issue(actor, limit)

    def _ask(self, actor: str, limit: int) -> tuple[Ticket, ...]:
        return self.queue.issue(self._name(actor), self.engines[actor], limit, self.calls[actor])

    def _name(self, actor: str) -> str:
        return f"{actor}.{self.lives[actor]}"

    def _settings(self) -> QueueSettings:
        return QueueSettings(
            task="t",
            batch_size=4,
            samples_per_prompt=2,
            max_lag=self.max_lag,
            flow_lag=self.config.flow_lag,
            whole_groups=self.whole_groups,
            too_old=self.too_old,
            max_attempts=self.max_attempts,
            max_failure_rate=1.0,
            hard=self.too_old != "keep",
            curriculum=Curriculum(skip="equal") if self.skips else None,
            as_needed=self.as_needed and self.max_lag > 0,
        )

    def _report(self) -> QueueReport:
        return report.report(self.queue.state)

    def _waiting_for(self) -> str:
        return report.waiting_for(self.queue.settings, self.queue.state)

    @rule()
    def crash(self) -> None:
        """The queue dies; another one is rebuilt from what was acknowledged."""
        self.write()
        before, needed = (self._report(), self._waiting_for()), self.queue.state.needed.lag
        state = snapshot.rebuild_state(self._settings(), self.disk.read(), Path("journal"))
        self.queue = QueueRules(self._settings(), state)
        assert (self._report(), self._waiting_for()) == before
        assert self.queue.state.needed.lag == needed

    @rule()
    def write(self) -> None:
        """Some of what happened is in one transaction, some in the next."""
        self.disk.write(snapshot.take_changes(self.queue.settings, self.queue.state))

    @rule()
    def driver_dies(self) -> None:
        """All processes die; a new driver reopens the trajectories in flight."""
        for actor in ACTORS:
            self._bury(actor)
        self.crash()
        self.queue.reopen_all()

    @rule(data=st.data())
    def sample_tokens(self, data: st.DataObject) -> None:
        """Some of what is in flight grows by a token of its engine's present version."""
        for actor, _, versions in self.flying.values():
            if data.draw(st.booleans()):
                versions.append(self.engines[actor])

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self._deliver(data.draw(st.sampled_from(sorted(self.flying))))

    def _deliver(self, identity: Identity) -> None:
        actor, _, versions = self.flying.pop(identity)
        done = self._trajectory(identity, versions or [self.engines[actor]])
        assert self._put(done)
        self.tokens_delivered += done.num_tokens
        self.delivered.append(done)

    def _put(self, done: Trajectory) -> bool:
        """True if an actor waited for it. A queue with shards gets its record alone."""
        if not self.records:
            return self.queue.put([done]) == 1
        before = self.queue.state.counts["stored"]
        self.queue.put_records([make_record(done, None)])
        return self.queue.state.counts["stored"] > before

    @precondition(lambda self: self.delivered or self.zombies)
    @rule(data=st.data())
    def deliver_late_or_again(self, data: st.DataObject) -> None:
        done = data.draw(st.sampled_from(self.delivered + self.zombies))
        assert not self._put(done)
        self.tokens_delivered += done.num_tokens

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(sorted(self.flying)))
        actor, _, _ = self.flying.pop(identity)
        slot = (identity.prompt, identity.sample)
        self.failures[slot] = self.failures.get(slot, 0) + 1
        self.queue.fail(Failure(identity=identity, actor=actor, stage="reward", reason="no", tokens=3))
        self.tokens_delivered += 3
        if self.failures[slot] == self.max_attempts and self.whole_groups:
            for other in [other for other in self.flying if other.prompt == identity.prompt]:
                del self.flying[other]

    @rule(actor=st.sampled_from(ACTORS))
    def die(self, actor: str) -> None:
        """The actor dies; what it had finished but not delivered may arrive after all."""
        dead = self._name(actor)
        self._bury(actor)
        self.queue.mark_dead(dead)
        try:
            self.queue.issue(dead, self.queue.state.version, 1, 1_000_000)
            raise AssertionError("a zombie got a ticket")
        except QueueError:
            pass

    def _bury(self, actor: str) -> None:
        for identity in [identity for identity, (owner, _, _) in self.flying.items() if owner == actor]:
            _, _, versions = self.flying.pop(identity)
            self.zombies.append(self._trajectory(identity, versions or [self.engines[actor]]))
        self.lives[actor] += 1
        self.calls[actor] = 0
        self.engines[actor] = self.queue.state.version

    @rule(actor=st.sampled_from(ACTORS))
    def swap(self, actor: str) -> None:
        self.engines[actor] = self.queue.state.version

    # --- learner -----------------------------------------------------------------------------------------

    @rule(ahead=st.integers(0, 1))
    def take(self, ahead: int) -> None:
        """The next batch, or the one behind it; a learner asks for that when it has the next one."""
        version = self.queue.state.version
        self._take(version + ahead if version in self.leases else version)

    def _take(self, version: int) -> bool:
        batch = self.queue.take(version)
        if version in self.leases:
            assert batch == self.leases[version], "a lease gave another batch"
            return True
        if batch is None:
            return False
        self.leases[version] = batch
        assert (batch.version, len(batch.trajectories)) == (version, 4)
        assert batch.min_version == (0 if self.too_old == "keep" else version - self.max_lag)
        numbers = [t.identity.prompt * 2 + t.identity.sample for t in batch.trajectories]
        assert numbers == sorted(numbers), "not in order of age"
        if self.too_old == "windowed":
            self._check_window(numbers)
        for done in batch.trajectories:
            slot = (done.identity.prompt, done.identity.sample)
            assert slot not in self.consumed, "leased twice"
            self.consumed[slot] = version
            self.trained.add(done.identity)
            assert isinstance(done, TrajectoryRecord) is self.records
            whole = next(one for one in self.delivered if one.identity == done.identity)
            young = [v for v in ints(whole.versions).tolist() if v >= batch.min_version]
            assert young, "a trajectory without a token to train on"
            if self.too_old != "mask":
                assert len(young) == whole.num_tokens, "older than max_lag"
        if self.whole_groups:
            assert all(n % 2 == 0 and numbers[i + 1] == n + 1 for i, n in enumerate(numbers) if i % 2 == 0)
        return True

    def _check_window(self, numbers: list[int]) -> None:
        """Everything that was passed by a window or more was taken before, or abandoned."""
        size = 2 if self.whole_groups else 1
        room = self.max_lag - self.config.flow_lag
        held = [slot.number for slot in self.queue.state.slots.values()]
        assert min(held, default=numbers[-1]) // size + room * (4 // size) + 1 > numbers[-1] // size, (
            "behind the window"
        )

    @precondition(lambda self: self.queue.state.version in self.leases)
    @rule()
    def publish(self) -> None:
        batch = self.leases.pop(self.queue.state.version)
        self.tokens_consumed += sum(done.num_tokens for done in batch.trajectories)
        self.queue.publish(self.queue.state.version + 1)

    @rule()
    def drain(self) -> None:
        """With one engine that keeps up, and no more failures, the next batch always comes: nothing can wedge."""
        version = self.queue.state.version
        for _ in range(60):
            if self._take(version):
                return
            self.engines["a"] = version
            self.issue("a", 6)
            for identity in list(self.flying):
                self._deliver(identity)
        raise AssertionError(f"no batch came: {self._waiting_for()}")

    # --- always ------------------------------------------------------------------------------------------

    @invariant()
    def the_counters_add_up(self) -> None:
        counted = self._report()
        assert counted.in_flight == len(self.flying)
        leased = sum(len(batch.trajectories) for batch in self.leases.values())
        assert counted.consumed + leased == len(self.consumed)
        live = counted.ready + counted.in_flight
        assert live + len(self.consumed) + self._given_up() <= counted.issued

    def _given_up(self) -> int:
        """Slots that were abandoned, or skipped with their prompt."""
        counted = self._report()
        assert self.skips or not counted.skipped_prompts
        return counted.dropped["abandoned"] + 2 * counted.skipped_prompts

    @invariant()
    def every_delivered_token_is_in_one_place(self) -> None:
        tokens = dict(self._report().tokens)
        assert tokens["consumed"] == self.tokens_consumed
        assert tokens["delivered"] == self.tokens_delivered
        assert tokens.pop("delivered") == sum(tokens.values())

    @invariant()
    def admission_bounds_what_is_held(self) -> None:
        """Memory: whatever waits or flies fits into max_lag + 1 batches of the newest engine, and one prefetch."""
        counted = self._report()
        newest = max(self.engines.values())
        newest = self.queue.state.version if self.too_old == "keep" else newest
        assert counted.issued - self._given_up() <= (newest + self.max_lag + 1) * 4

    @invariant()
    def what_is_taken_in_order_is_never_too_old(self) -> None:
        if self.too_old in ("wait", "windowed", "keep"):
            assert self._report().dropped["too_old"] == self._report().masked_tokens == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every slot that was ever opened is live, consumed or counted as abandoned."""
        counted = self._report()
        waiting = len({slot for slot in self.queue.state.slots})
        assert waiting + len(self.consumed) + self._given_up() == counted.issued

    @invariant()
    def every_attempt_is_in_one_place(self) -> None:
        """Alive, trained on, or ended with a reason, by its identity; and so is every slot, by its number."""
        ended = self.disk.ended | {one.identity: one for one in self.queue.state.pending_changes.ended}
        alive = {slot.identity for slot in self.queue.state.slots.values()}
        assert not alive & self.trained and not alive & set(ended) and not self.trained & set(ended)
        assert self.seen <= alive | self.trained | set(ended)
        given_up = {one.number for one in ended.values() if one.state in GIVEN_UP}
        skipped = self.disk.skipped | self.queue.state.pending_changes.skipped
        slots = [one.prompt * 2 + one.sample for one in alive | self.trained] + list(given_up)
        slots += [number for first in skipped for number in (first, first + 1)]
        assert sorted(slots) == list(range(self._report().issued))

    def _trajectory(self, identity: Identity, versions: list[int]) -> Trajectory:
        made = trajectory([5] * len(versions), versions=versions)
        columns = {name: getattr(made, name) for name in made.__struct_fields__ if name != "identity"}
        return Trajectory(**columns, identity=identity)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
