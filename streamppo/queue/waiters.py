"""The queue's waiting callers; each caller is woken only by an event that concerns it.

    tickets     an actor whose engine holds version v waits until a slot is reopened, or may open for v
    batches     all ranks that wait for the batch of one version share one future
    versions    all engines that hold version v share one event, set when a version above v is published

After each change of the queue, `serve` runs before anything is awaited, so that no caller waits for a ticket, batch or
version that is available.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

from streamppo.errors import QueueError
from streamppo.queue.rules.rules import QueueRules
from streamppo.types import Batch, Ticket

Tickets = tuple[Ticket, ...]


@dataclass(slots=True, eq=False)
class Caller:
    """An actor that waits for tickets; callers with a smaller `place` are served first."""

    actor: str
    engine_version: int
    limit: int
    call: int
    place: int
    tickets_future: asyncio.Future[Tickets]


class TicketLine:
    """Actors that wait for tickets, in the order of their first calls; of an actor's calls, only the newest waits."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._callers: dict[str, Caller] = {}
        self._by_version: dict[int, dict[str, Caller]] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._next_place = count()

    async def tickets(self, actor: str, engine_version: int, limit: int, call: int) -> Tickets:
        """Wait until `QueueRules.issue` gives tickets, and return them. A cancelled call leaves the line."""
        if tickets := self.available(actor, engine_version, limit, call):
            return tickets
        self._dismiss(actor)
        future: asyncio.Future[Tickets] = asyncio.get_running_loop().create_future()
        caller = Caller(actor, engine_version, limit, call, self._place(actor, call), future)
        self._enter(caller)
        try:
            return await future
        finally:
            self._leave(caller)

    def available(self, actor: str, engine_version: int, limit: int, call: int) -> Tickets:
        if tickets := self._rules.issue(actor, engine_version, limit, call):
            self._places.pop(actor, None)
        return tickets

    def serve(self) -> None:
        served = [version for version in self._by_version if self._rules.has_ticket(version)]
        if not served:
            return
        able = [caller for version in served for caller in self._by_version[version].values()]
        for caller in sorted(able, key=lambda caller: caller.place):
            if not self._rules.has_ticket(max(served)):
                return
            if self._rules.has_ticket(caller.engine_version):
                self._answer(caller)

    def note_version(self, actor: str, engine_version: int) -> None:
        """Record that the engine of `actor` holds `engine_version`, for which the actor may get tickets."""
        caller = self._callers.get(actor)
        if caller is not None and caller.engine_version != engine_version:
            self._leave(caller)
            caller.engine_version = engine_version
            self._enter(caller)
            self._answer(caller)

    def refuse_dead(self, actor: str) -> None:
        """Make the waiting call of `actor`, which was marked dead, raise the `QueueError` of the rules."""
        if (caller := self._callers.get(actor)) is not None:
            self._answer(caller)
        self._places.pop(actor, None)

    def clear(self) -> None:
        for actor in list(self._callers):
            self._dismiss(actor)
        self._places.clear()

    def _answer(self, caller: Caller) -> None:
        if caller.tickets_future.done():
            # The call was cancelled; `tickets` will remove the caller from the line.
            return
        try:
            tickets = self._rules.issue(caller.actor, caller.engine_version, caller.limit, caller.call)
        except QueueError as refused:
            self._leave(caller)
            caller.tickets_future.set_exception(refused)
            return
        if tickets:
            self._leave(caller)
            self._places.pop(caller.actor, None)
            caller.tickets_future.set_result(tickets)

    def _dismiss(self, actor: str) -> None:
        if (caller := self._callers.get(actor)) is not None:
            self._leave(caller)
            if not caller.tickets_future.done():
                caller.tickets_future.set_result(())

    def _place(self, actor: str, call: int) -> int:
        last_call, place = self._places.get(actor, (call, -1))
        if place < 0 or last_call != call:
            place = next(self._next_place)
            self._places[actor] = (call, place)
        return place

    def _enter(self, caller: Caller) -> None:
        self._callers[caller.actor] = caller
        self._by_version.setdefault(caller.engine_version, {})[caller.actor] = caller

    def _leave(self, caller: Caller) -> None:
        if self._callers.get(caller.actor) is not caller:
            return
        del self._callers[caller.actor]
        line = self._by_version[caller.engine_version]
        del line[caller.actor]
        if not line:
            del self._by_version[caller.engine_version]


class Polls:
    """Long polls: each returns empty after `shortest_s` seconds or later, so that at most `EMPTY_PER_S` a second do."""

    EMPTY_PER_S = 50

    def __init__(self, shortest_s: float) -> None:
        self.waiting = 0
        self._shortest_s = shortest_s

    @asynccontextmanager
    async def bound_wait(self) -> AsyncGenerator[None]:
        """Raise `TimeoutError` in the block when the poll must return."""
        self.waiting += 1
        try:
            async with asyncio.timeout(max(self._shortest_s, self.waiting / self.EMPTY_PER_S)):
                yield
        finally:
            self.waiting -= 1


class BatchWaiters:
    """Ranks that wait for batches. After the run is `stopped`, no rank waits."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._wanted: dict[int, asyncio.Future[Batch | None]] = {}
        self.stopped = False

    def batch(self, version: int) -> asyncio.Future[Batch | None]:
        """Return the future of the batch (None after a stop). All callers share it: await it with `asyncio.shield`."""
        if version not in self._wanted:
            self._wanted[version] = asyncio.get_running_loop().create_future()
        future = self._wanted[version]
        self._resolve(version)
        return future

    def serve(self) -> None:
        for version in sorted(self._wanted):
            self._resolve(version)

    def _resolve(self, version: int) -> None:
        try:
            batch = self._take(version)
        except QueueError as refused:
            self._wanted.pop(version).set_exception(refused)
        else:
            if batch is not None or self.stopped:
                self._wanted.pop(version).set_result(batch)

    def _take(self, version: int) -> Batch | None:
        # A learner may prefetch a batch before the version at which its update starts is published.
        if version > self._rules.state.version + 1:
            return None
        return self._rules.take(version, leased_only=self.stopped)


class VersionWaiters:
    """Engines that wait for a version above their own."""

    def __init__(self) -> None:
        self._events: dict[int, asyncio.Event] = {}

    async def above(self, version: int) -> None:
        await self._events.setdefault(version, asyncio.Event()).wait()

    def wake(self, version: int) -> None:
        for waited in [waited for waited in self._events if waited < version]:
            self._events.pop(waited).set()
