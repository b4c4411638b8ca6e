"""A commit returns when all changes are written, and an empty one writes nothing."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from test_rules import done, queue

from streamppo.errors import JournalError
from streamppo.queue.group_commit import Commits, Transaction


class Disk:
    """Stands in for the journal: the transactions that were written, each once `gate` is open."""

    def __init__(self) -> None:
        self.written: list[Transaction] = []
        self.gate = threading.Event()
        self.gate.set()

    def write(self, one: Transaction) -> None:
        assert self.gate.wait(20)
        self.written.append(one)


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_what_has_been_written_is_not_written_again_and_each_change_is() -> None:
    async def main() -> None:
        disk, rules = Disk(), queue()
        commits = Commits(rules, disk.write, lambda _: None, int)
        await commits.commit()
        assert len(disk.written) == 1, "a queue that has just begun is there when it is rebuilt"
        await commits.commit()
        assert len(disk.written) == 1
        (ticket,) = rules.issue("a", 0, 1, 0)
        changes: list[Callable[[], object]] = [
            lambda: rules.put([done(ticket)]),
            # Nothing but a counter changes.
            lambda: rules.put([done(ticket)]),
            lambda: rules.mark_dead("b"),
        ]
        for number, change in enumerate(changes, start=2):
            change()
            await commits.commit()
            await commits.commit()
            assert len(disk.written) == number
        assert disk.written[-2].changes.counters.counts["duplicates"] == 1
        assert disk.written[-1].changes.counters.fenced == ("b",)

    asyncio.run(main())


def test_a_commit_without_a_change_of_its_own_waits_for_the_transaction_under_way() -> None:
    async def main() -> None:
        disk, rules = Disk(), queue()
        commits = Commits(rules, disk.write, lambda _: None, int)
        await commits.commit()
        rules.issue("a", 0, 1, 0)
        disk.gate.clear()
        first = asyncio.create_task(commits.commit())
        await _settled()
        second = asyncio.create_task(commits.commit())
        await _settled()
        assert not first.done() and not second.done()
        disk.gate.set()
        await asyncio.gather(first, second)
        assert len(disk.written) == 2

    asyncio.run(main())


@pytest.mark.parametrize("error", [JournalError("full"), RuntimeError("can't start new thread"), MemoryError("full")])
def test_after_a_failed_write_every_commit_raises_also_one_without_a_change(error: Exception) -> None:
    def refuse(_: Transaction) -> None:
        raise error

    async def main() -> None:
        commits = Commits(queue(), refuse, lambda _: None, int)
        with pytest.raises(type(error)):
            await commits.commit()
        with pytest.raises(JournalError, match=str(error)):
            await commits.commit()

    asyncio.run(main())


def test_after_a_cancelled_write_every_commit_raises_and_none_writes_beside_it() -> None:
    async def main() -> None:
        disk = Disk()
        disk.gate.clear()
        commits = Commits(queue(), disk.write, lambda _: None, int)
        first = asyncio.create_task(commits.commit())
        await _settled()
        first.cancel()
        for _ in range(2):
            with pytest.raises(JournalError, match=r"not written: CancelledError\(\)"):
                await commits.commit()
        disk.gate.set()

    asyncio.run(main())
