"""Callers of the queue that wait, each woken by what it waits for and by nothing else.

    tickets     an engine of version v waits until a slot is to be sampled again, or one more may open for v
    batches     all ranks that wait for the batch of a version wait for one future
    versions    all engines that wait for a version above theirs wait for one event

A change of the queue is followed by `serve` before anything is awaited: so nobody waits for what is there. A change
that concerns nobody costs a look at each engine version and each batch that is waited for, however many callers wait.
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
    """An actor that waits for tickets. A smaller `place` is nearer to the head of the line."""

    actor: str
    engine_version: int
    limit: int
    call: int
    place: int
    tickets_future: asyncio.Future[Tickets]


class TicketLine:
    """Actors that wait for tickets, in the order in which they first asked; one that asks again keeps its place.

    An actor waits once: its newest request is the one that counts, and the one before gets no tickets.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._callers: dict[str, Caller] = {}
        self._by_version: dict[int, dict[str, Caller]] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._next_place = count()

    async def tickets(self, actor: str, engine_version: int, limit: int, call: int) -> Tickets:
        """See `QueueRules.issue`; waits until there is a ticket. A wait that is cancelled leaves the line."""
        if tickets := self.at_once(actor, engine_version, limit, call):
            return tickets
        self._turn_away(actor)
        found: asyncio.Future[Tickets] = asyncio.get_running_loop().create_future()
        caller = Caller(actor, engine_version, limit, call, self._place(actor, call), found)
        self._enter(caller)
        try:
            return await found
        finally:
            self._leave(caller)

    def at_once(self, actor: str, engine_version: int, limit: int, call: int) -> Tickets:
        """See `QueueRules.issue`: the tickets that are there, if any."""
        if tickets := self._rules.issue(actor, engine_version, limit, call):
            self._places.pop(actor, None)
        return tickets

    def serve(self) -> None:
        """Give out all tickets that there are, the longest waiting first."""
        served = [version for version in self._by_version if self._rules.has_ticket(version)]
        if not served:
            return
        able = [caller for version in served for caller in self._by_version[version].values()]
        for caller in sorted(able, key=lambda caller: caller.place):
            if not self._rules.has_ticket(max(served)):
                return
            if self._rules.has_ticket(caller.engine_version):
                self._ask(caller)

    def hear(self, actor: str, engine_version: int) -> None:
        """The engine of `actor` holds `engine_version`, which may let it have tickets."""
        caller = self._callers.get(actor)
        if caller is not None and caller.engine_version != engine_version:
            self._leave(caller)
            caller.engine_version = engine_version
            self._enter(caller)
            self._ask(caller)

    def refuse_dead(self, actor: str) -> None:
        """Refuse the tickets that `actor` waits for: it was given up for dead."""
        if (caller := self._callers.get(actor)) is not None:
            self._ask(caller)
        self._places.pop(actor, None)

    def lost_all(self) -> None:
        """Turn everybody away."""
        for actor in list(self._callers):
            self._turn_away(actor)
        self._places.clear()

    def _ask(self, caller: Caller) -> None:
        """Give `caller` its tickets, if there are any, or the rules' refusal."""
        if caller.tickets_future.done():
            # Cancelled, and on its way out of the line.
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

    def _turn_away(self, actor: str) -> None:
        if (caller := self._callers.get(actor)) is not None:
            self._leave(caller)
            if not caller.tickets_future.done():
                caller.tickets_future.set_result(())

    def _place(self, actor: str, call: int) -> int:
        asked, place = self._places.get(actor, (call, -1))
        if place < 0 or asked != call:
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
    """Calls that wait here and come back empty after `shortest_s`; after longer if they are very many.

    An empty answer costs as much as any other, and says nothing.
    """

    EMPTY_PER_S = 50
    """Calls that come back empty in a second, at most."""

    def __init__(self, shortest_s: float) -> None:
        self.waiting = 0
        self._shortest_s = shortest_s

    @asynccontextmanager
    async def bound_wait(self) -> AsyncGenerator[None]:
        """Raise `TimeoutError` if the block waits for longer than it may."""
        self.waiting += 1
        try:
            async with asyncio.timeout(max(self._shortest_s, self.waiting / self.EMPTY_PER_S)):
                yield
        finally:
            self.waiting -= 1


class BatchWaiters:
    """Ranks that wait for batches; nobody waits any more once the run is `stopped`."""

    def __init__(self, rules: QueueRules) -> None:
        self._rules = rules
        self._wanted: dict[int, asyncio.Future[Batch | None]] = {}
        self.stopped = False

    def batch(self, version: int) -> asyncio.Future[Batch | None]:
        """The batch of `QueueRules.take` as soon as it is whole; None after a stop, unless it is leased.

        All share one future: shield it. To look for a batch may open slots again, so that there are tickets after it.
        """
        if version not in self._wanted:
            self._wanted[version] = asyncio.get_running_loop().create_future()
        wanted = self._wanted[version]
        self._look(version)
        return wanted

    def serve(self) -> None:
        """Hand over every batch that has become whole, the earliest first."""
        for version in sorted(self._wanted):
            self._look(version)

    def _look(self, version: int) -> None:
        try:
            batch = self._take(version)
        except QueueError as refused:
            self._wanted.pop(version).set_exception(refused)
        else:
            if batch is not None or self.stopped:
                self._wanted.pop(version).set_result(batch)

    def _take(self, version: int) -> Batch | None:
        # A learner may ask for its next batch before the version that it starts from is published.
        if version > self._rules.state.version + 1:
            return None
        return self._rules.take(version, leased_only=self.stopped)


class VersionWaiters:
    """Engines that wait for a version above their own."""

    def __init__(self) -> None:
        self._events: dict[int, asyncio.Event] = {}

    async def above(self, version: int) -> None:
        """Wait until a version above `version` is published."""
        await self._events.setdefault(version, asyncio.Event()).wait()

    def wake(self, version: int) -> None:
        """Wake all that wait for `version` or one before it."""
        for waited in [waited for waited in self._events if waited < version]:
            self._events.pop(waited).set()
