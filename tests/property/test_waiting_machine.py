"""Every order of calls and changes: no actor waits for available tickets, and the longest waiting gets them."""

import asyncio
from pathlib import Path

import msgspec
from conftest import trajectory
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamppo.errors import QueueError
from streamppo.queue.rules.records import Changes, Lease, SavedSlot
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import QueueSettings, QueueState
from streamppo.queue.store import snapshot
from streamppo.queue.waiters import BatchWaiters, TicketLine
from streamppo.types import Batch, Failure, Ticket

ACTORS = st.sampled_from("abcdef")


class WaitingMachine(RuleBasedStateMachine):
    """`asked` is the order of requests that wait, by actor; `waits` are their tasks, `holds` their tickets."""

    @initialize(max_lag=st.integers(0, 2), too_old=st.sampled_from(["drop", "wait"]))
    def begin(self, max_lag: int, too_old: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.settings = QueueSettings(
            task="t",
            batch_size=3,
            samples_per_prompt=1,
            max_lag=max_lag,
            flow_lag=max_lag,
            whole_groups=False,
            too_old=too_old,  # pyright: ignore[reportArgumentType]
            max_attempts=2,
            max_failure_rate=1.0,
        )
        self.slots: dict[tuple[int, int], bytes] = {}
        self.leases: dict[int, bytes] = {}
        self.lives, self.calls, self.engines = (dict.fromkeys("abcdef", 0) for _ in range(3))
        self.holds: dict[str, list[Ticket]] = {}
        self._open(QueueRules(self.settings, QueueState()))

    def _open(self, rules: QueueRules) -> None:
        self.rules, self.line, self.batches = rules, TicketLine(rules), BatchWaiters(rules)
        self.waits: dict[str, asyncio.Task[tuple[Ticket, ...]]] = {}
        self.asked: list[str] = []
        self.batch: asyncio.Future[Batch | None] | None = None

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for task in self.waits.values():
                task.cancel()
            self.turn()
            self.loop.close()

    @rule()
    def turn(self) -> None:
        """Every woken task runs."""
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))
        for actor, task in list(self.waits.items()):
            if task.done():
                del self.waits[actor]
                if not task.cancelled() and task.exception() is None and task.result():
                    self.calls[actor] += 1
                    self.holds.setdefault(self._name(actor), []).extend(task.result())
                    self._unask(actor)

    def _changed(self) -> None:
        """Serve; whoever is served has waited longer than all who could have been."""
        pending = {actor: task for actor, task in self.waits.items() if self._pends(actor)}
        before = len(self.rules.state.calls)
        could = [actor for actor in self.asked if actor in pending]
        self.batches.serve()
        self.line.serve()
        assert len(self.rules.state.calls) >= before
        served = {actor for actor in could if not self._pends(actor)}
        for at, actor in enumerate(could):
            if actor not in served and any(later in served for later in could[at + 1 :]):
                newest = max(self.engines[later] for later in could[at + 1 :] if later in served)
                assert self.engines[actor] < newest, f"{actor} was overtaken"

    def _pends(self, actor: str) -> bool:
        """Say if a task waits, and has neither been answered nor been cancelled."""
        caller = self.line._callers.get(self._name(actor))
        return caller is not None and not caller.tickets_future.done()

    # --- callers -------------------------------------------------------------------------------------------

    @rule(actor=ACTORS, limit=st.integers(1, 3))
    def ask(self, actor: str, limit: int) -> None:
        """An actor asks, or asks once more."""
        self.turn()
        if actor not in self.asked:
            self.asked.append(actor)
        before = self.waits.pop(actor, None)
        name, version = self._name(actor), self.engines[actor]
        task = self.loop.create_task(self.line.tickets(name, version, limit, self.calls[actor]))
        self.waits[actor] = task
        self.turn()
        assert before is None or before.result() == (), "a request that was repeated got tickets"

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A wait is cut off, before or after its tickets were found; things may change before the loop turns."""
        self.waits[data.draw(st.sampled_from(sorted(self.waits)))].cancel()

    @rule(actor=ACTORS)
    def swap(self, actor: str) -> None:
        self.engines[actor] = self.rules.state.version
        self.line.note_version(self._name(actor), self.engines[actor])

    @rule(actor=ACTORS)
    def lose(self, actor: str) -> None:
        self.turn()
        name, task = self._name(actor), self.waits.pop(actor, None)
        self.rules.mark_dead(name)
        self.line.refuse_dead(name)
        self._unask(actor)
        self._changed()
        self.holds.pop(name, None)
        self.lives[actor] += 1
        self.calls[actor] = 0
        self.turn()
        assert task is None or task.cancelled() or isinstance(task.exception(), QueueError)

    # --- changes -------------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data(), well=st.booleans())
    def finish(self, data: st.DataObject, well: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, held in self.holds.items() if held)))
        ticket = self.holds[name].pop(0)
        if well:
            made = trajectory([5], versions=[self.engines[name[0]]])
            self.rules.put([msgspec.structs.replace(made, identity=ticket.identity)])
        else:
            self.rules.fail(Failure(identity=ticket.identity, actor=name, stage="reward", reason="no"))
        self._changed()

    @rule()
    def take(self) -> None:
        """The learner asks for its batch; to look for it may drop what is too old."""
        if self.batch is None:
            self.batch = self.loop.run_until_complete(self._batch())
            self._changed()

    async def _batch(self) -> asyncio.Future[Batch | None]:
        return self.batches.batch(self.rules.state.version)

    @precondition(lambda self: self.batch is not None and self.batch.done())
    @rule()
    def publish(self) -> None:
        self.batch = None
        self.rules.publish(self.rules.state.version + 1)
        self._changed()

    @rule()
    def crash(self) -> None:
        """The queue dies, and is rebuilt; actors that wait ask again, for the same tickets if they were given some."""
        for task in self.waits.values():
            task.cancel()
        self.turn()
        changes = snapshot.take_changes(self.settings, self.rules.state)
        self.slots |= {(slot.number, slot.part): msgspec.msgpack.encode(slot) for slot in changes.slots}
        self.leases |= {lease.version: msgspec.msgpack.encode(lease) for lease in changes.leases}
        for place in changes.removed:
            self.slots.pop(place, None)
        self.leases = {version: row for version, row in self.leases.items() if version >= changes.counters.version}
        slots = tuple(msgspec.msgpack.decode(self.slots[place], type=SavedSlot) for place in sorted(self.slots))
        leases = tuple(msgspec.msgpack.decode(self.leases[version], type=Lease) for version in sorted(self.leases))
        again = self.asked
        state = snapshot.rebuild_state(self.settings, Changes(changes.counters, slots, leases), Path("journal"))
        self._open(QueueRules(self.settings, state))
        for actor in again:
            self.ask(actor, 1)

    @rule()
    def everybody_is_served(self) -> None:
        """While trajectories finish and versions follow, everybody who waits gets tickets: nobody starves."""
        waiting = [actor for actor in self.waits if self._pends(actor)]
        for _ in range(40):
            self.turn()
            if not any(actor in self.waits for actor in waiting):
                return
            for name in [name for name, held in self.holds.items() if held]:
                while self.holds[name]:
                    ticket = self.holds[name].pop(0)
                    made = trajectory([5], versions=[self.rules.state.version])
                    self.rules.put([msgspec.structs.replace(made, identity=ticket.identity)])
            self.take()
            self._changed()
            if self.batch is not None and self.batch.done():
                self.publish()
            self._let_the_idle_ask()
            for actor in waiting:
                self.swap(actor)
        raise AssertionError("somebody still waits")

    def _let_the_idle_ask(self) -> None:
        """An answer that was cut off is asked for again, as an actor does; else its tickets hold up all others."""
        for actor in self.lives:
            last = self.rules.state.calls.get(self._name(actor))
            if last is not None and last.call == self.calls[actor] and actor not in self.waits:
                self.ask(actor, 1)

    # --- always --------------------------------------------------------------------------------------------

    @invariant()
    def nobody_waits_for_tickets_that_are_there(self) -> None:
        if not hasattr(self, "rules"):
            return
        for actor in self.waits:
            assert not (self._pends(actor) and self.rules.has_ticket(self.engines[actor])), f"{actor} was not woken"

    @invariant()
    def nobody_stands_in_line_twice(self) -> None:
        if not hasattr(self, "rules"):
            return
        in_line = [name for line in self.line._by_version.values() for name in line]
        assert sorted(in_line) == sorted(self.line._callers)
        assert all(self.line._by_version.values())

    def _name(self, actor: str) -> str:
        return f"{actor}.{self.lives[actor]}"

    def _unask(self, actor: str) -> None:
        if actor in self.asked:
            self.asked.remove(actor)


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
