"""Callers that wait in the queue: only their own event wakes them, in order."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec
import pytest
from conftest import trajectory

from streamppo.errors import QueueError
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import QueueSettings, QueueState
from streamppo.queue.waiters import BatchWaiters, Polls, TicketLine, VersionWaiters
from streamppo.types import Failure, Ticket, Trajectory

SETTINGS = QueueSettings(
    task="t",
    batch_size=2,
    samples_per_prompt=1,
    max_lag=1,
    flow_lag=1,
    whole_groups=False,
    too_old="drop",
    max_attempts=3,
    max_failure_rate=1.0,
)


Waiting: TypeAlias = asyncio.Task[tuple[Ticket, ...]]
"""A caller in the line."""


class Counting(QueueRules):
    """The rules, and the number of requests for tickets or a batch."""

    asked = 0

    def issue(self, actor: str, engine_version: int, limit: int, call: int) -> tuple[Ticket, ...]:
        self.asked += 1
        return super().issue(actor, engine_version, limit, call)


def full() -> tuple[Counting, TicketLine, tuple[Ticket, ...]]:
    """Rules that have given all tickets of version 0 to `holder`, and a line in front of them."""
    rules = Counting(SETTINGS, QueueState())
    held = rules.issue("holder", 0, 100, 0)
    assert len(held) == 4
    return rules, TicketLine(rules), held


def published() -> tuple[Counting, TicketLine, tuple[Ticket, ...]]:
    """The same after version 1, made of the first two tickets."""
    rules, line, held = full()
    for ticket in held[:2]:
        rules.put([finished(ticket)])
    assert rules.take(0) is not None
    rules.publish(1)
    return rules, line, held


async def given_up() -> tuple[Counting, TicketLine, tuple[Ticket, ...], Waiting, Waiting]:
    """The same when all is given away, an older and a newer engine wait in this order, and a slot is given up."""
    rules, line, held = published()
    assert len(rules.issue("holder", 1, 100, 1)) == 2
    older, newer = [*waits(line, "a", version=0), *waits(line, "b", version=1)]
    await turn()
    give_up(rules, held[3])
    return rules, line, held, older, newer


def waits(line: TicketLine, *actors: str, version: int = 0, call: int = 0) -> list[Waiting]:
    return [asyncio.create_task(line.tickets(actor, version, 1, call)) for actor in actors]


def fail(rules: QueueRules, ticket: Ticket) -> None:
    """One more slot is to be sampled again."""
    rules.fail(Failure(identity=ticket.identity, actor="holder", stage="reward", reason="no"))


def give_up(rules: QueueRules, ticket: Ticket) -> None:
    """The slot fails until it is abandoned: it holds no room."""
    slot = rules.state.slots[ticket.identity.prompt, ticket.identity.sample]
    for _ in range(SETTINGS.max_attempts):
        rules.fail(Failure(identity=slot.identity, actor="holder", stage="reward", reason="no"))
        if slot.failures < SETTINGS.max_attempts:
            slot.issue("holder", 1)


def finished(ticket: Ticket, version: int = 0) -> Trajectory:
    return msgspec.structs.replace(trajectory([5], versions=[version]), identity=ticket.identity)


async def turn() -> None:
    """Let every woken task run."""
    for _ in range(5):
        await asyncio.sleep(0)


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__ = test.__name__
    return run


# --- tickets -------------------------------------------------------------------------------------------------


@in_loop
async def test_tickets_go_to_the_first_in_line_and_nobody_else_is_asked() -> None:
    rules, line, held = full()
    first, *others = waits(line, *"abcdefgh")
    await turn()
    asked = rules.asked
    line.serve()
    assert rules.asked == asked, "nothing had changed"
    fail(rules, held[0])
    line.serve()
    await turn()
    assert first.result()[0].identity.attempt == 1
    assert not any(other.done() for other in others) and rules.asked == asked + 1
    for other in others:
        other.cancel()


@in_loop
async def test_a_swap_gives_tickets_to_the_engine_that_has_swapped_and_to_no_other() -> None:
    _, line, _ = published()
    first, second = waits(line, "a", "b")
    await turn()
    line.serve()
    await turn()
    assert not first.done(), "an engine of version 0 has its tickets of version 0 alone"
    line.note_version("b", 1)
    await turn()
    assert len(second.result()) == 1 and not first.done()
    first.cancel()


@in_loop
async def test_an_older_engine_at_the_head_of_the_line_keeps_no_newer_one_waiting() -> None:
    _, line, _, older, newer = await given_up()
    line.serve()
    await turn()
    assert newer.done() and not older.done(), "the slot that was given up leaves room for version 1 alone"
    older.cancel()


@in_loop
async def test_after_the_last_ticket_of_an_older_engine_the_newer_ones_are_still_served() -> None:
    rules, line, held, older, newer = await given_up()
    fail(rules, held[2])
    line.serve()
    await turn()
    assert older.result()[0].identity == msgspec.structs.replace(held[2].identity, attempt=1)
    assert len(newer.result()) == 1


@in_loop
async def test_a_caller_that_was_cancelled_a_moment_ago_takes_no_ticket_with_it() -> None:
    rules, line, held = full()
    gone, next_one = waits(line, "a", "b")
    await turn()
    gone.cancel()
    fail(rules, held[0])
    line.serve()
    await turn()
    assert gone.cancelled()
    assert len(next_one.result()) == 1
    assert not line._callers and not line._by_version


@in_loop
async def test_tickets_whose_caller_was_cancelled_too_late_are_there_when_it_asks_again() -> None:
    rules, line, held = full()
    (gone,) = waits(line, "a")
    await turn()
    fail(rules, held[0])
    line.serve()
    gone.cancel()
    await turn()
    assert gone.cancelled()
    (again,) = waits(line, "a")
    assert len(await again) == 1


@in_loop
async def test_a_call_that_is_repeated_keeps_its_place_and_the_one_before_comes_back_empty() -> None:
    rules, line, held = full()
    first, second = waits(line, "a", "b")
    await turn()
    (again,) = waits(line, "a")
    await turn()
    assert first.result() == () and not again.done()
    again.cancel()
    await turn()
    (again,) = waits(line, "a")
    await turn()
    fail(rules, held[0])
    line.serve()
    await turn()
    assert len(again.result()) == 1 and not second.done(), "it had asked before b did"
    second.cancel()


@in_loop
async def test_an_actor_that_was_given_up_for_dead_is_refused_and_the_next_one_served() -> None:
    rules, line, _ = full()
    dead, next_one = waits(line, "a", "b")
    await turn()
    rules.mark_dead("a")
    line.refuse_dead("a")
    await turn()
    with pytest.raises(QueueError, match="a was marked dead"):
        dead.result()
    rules.mark_dead("holder")
    line.refuse_dead("holder")
    line.serve()
    await turn()
    assert len(next_one.result()) == 1


@in_loop
async def test_everybody_is_turned_away_when_a_new_driver_begins() -> None:
    _, line, _ = full()
    waiting = waits(line, "a", "b")
    await turn()
    line.clear()
    assert [await one for one in waiting] == [(), ()]
    assert not line._places


# --- batches and versions ------------------------------------------------------------------------------------


@in_loop
async def test_all_ranks_get_one_batch_as_soon_as_it_is_whole() -> None:
    rules, _, held = full()
    batches = BatchWaiters(rules)
    early = batches.batch(1)
    ranks = [batches.batch(0) for _ in range(3)]
    rules.put([finished(held[0])])
    batches.serve()
    assert not ranks[0].done()
    rules.put([finished(held[1])])
    batches.serve()
    assert len({id(rank.result()) for rank in ranks}) == 1
    assert batches.batch(0).result() is ranks[0].result(), "leased"
    for ticket in held[2:]:
        rules.put([finished(ticket)])
    batches.serve()
    following = early.result()
    assert following is not None and following.version == 1


@in_loop
async def test_a_rank_that_leaves_takes_no_batch_from_the_others() -> None:
    rules, _, held = full()
    batches = BatchWaiters(rules)
    gone, stays = (asyncio.ensure_future(asyncio.shield(batches.batch(0))) for _ in range(2))
    await turn()
    gone.cancel()
    await turn()
    for ticket in held[:2]:
        rules.put([finished(ticket)])
    batches.serve()
    assert (await stays) is not None


@in_loop
async def test_a_stop_ends_every_wait_and_leaves_what_is_leased() -> None:
    rules, _, held = full()
    batches = BatchWaiters(rules)
    for ticket in held[:2]:
        rules.put([finished(ticket)])
    leased, waiting = batches.batch(0), batches.batch(1)
    batches.stopped = True
    batches.serve()
    assert await waiting is None
    assert await batches.batch(0) is leased.result()


@in_loop
async def test_a_batch_that_cannot_come_any_more_is_refused_to_its_waiters_alone() -> None:
    rules, _, held = full()
    batches = BatchWaiters(rules)
    for ticket in held[:2]:
        rules.put([finished(ticket)])
    late = batches.batch(0)
    assert late.result() is not None
    rules.publish(1)
    with pytest.raises(QueueError, match="batch 0 was requested at version 1"):
        await batches.batch(0)
    assert not batches._wanted


@in_loop
async def test_a_version_wakes_those_that_are_older_and_no_others() -> None:
    versions = VersionWaiters()
    waiting = {own: asyncio.create_task(versions.above(own)) for own in (-1, 0, 1, 2)}
    await turn()
    versions.wake(1)
    await turn()
    assert [own for own, task in waiting.items() if task.done()] == [-1, 0]
    versions.wake(3)
    await asyncio.gather(*waiting.values())
    assert not versions._events


def test_thousands_who_wait_are_not_answered_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, timeout = list[float | None](), asyncio.timeout

    def noted(seconds: float) -> asyncio.Timeout:
        waited.append(seconds)
        return timeout(seconds)

    async def wait(polls: Polls) -> None:
        async with polls.bound_wait():
            await asyncio.Event().wait()

    async def main() -> None:
        polls = Polls(5.0)
        calls = [asyncio.create_task(wait(polls)) for _ in range(2000)]
        await asyncio.sleep(0.05)
        assert (polls.waiting, waited[0], waited[-1]) == (2000, 5.0, 2000 / Polls.EMPTY_PER_S)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert polls.waiting == 0
        with pytest.raises(TimeoutError):
            await wait(Polls(0.01))

    monkeypatch.setattr(asyncio, "timeout", noted)
    asyncio.run(main())
