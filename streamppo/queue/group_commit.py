"""Changes of the queue become transactions of its journal: callers that come while one is written share the next.

    changed -> commit -> drained -> written -> acknowledged

A caller's change is in the journal when its `commit` returns. A transaction that would say nothing,
because one before has said all of it, is not written. Changes that were drained and not written are lost: from then on
every commit raises, and nothing is acknowledged any more.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamppo.errors import JournalError
from streamppo.queue.rules.records import Changes, PublishedVersion
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.store import snapshot
from streamppo.types import Identity


class Transaction(NamedTuple):
    """Changes, the versions `made` among them, and the trajectories that these consumed.

    `horizon` is as of the moment in which they were drained: what changes while they are written may still be undone
    by a death.
    """

    changes: Changes
    made: Sequence[PublishedVersion]
    consumed: Sequence[Identity]
    horizon: int


class Commits:
    """Drains `rules` into transactions, gives each to `write`, in a thread, and then to `written`."""

    def __init__(
        self,
        rules: QueueRules,
        write: Callable[[Transaction], None],
        written: Callable[[Transaction], None],
        horizon: Callable[[], int] = int,
    ) -> None:
        self._rules, self._write, self._then, self._horizon = rules, write, written, horizon
        self._made: list[PublishedVersion] = []
        self._consumed: list[Identity] = []
        self._asked = self._written = 0
        self.alone = asyncio.Lock()
        """Held while the journal is written."""
        self._broken: JournalError | None = None
        self._nothing: Changes | None = None
        """What is drained where nothing has changed since the last transaction: its counters alone."""

    def publish(self, made: PublishedVersion, consumed: Sequence[Identity]) -> None:
        """Have the next transaction say that a version was made of what was `consumed`."""
        self._made.append(made)
        self._consumed += consumed

    async def commit(self) -> None:
        """Return when everything that has changed so far is in the journal. Raises `JournalError` if it is not."""
        self._asked += 1
        mine = self._asked
        async with self.alone:
            if self._broken is not None:
                raise self._broken
            if self._written >= mine:
                return
            upto, transaction = self._asked, self._wait_until_written()
            if transaction.changes == self._nothing and not transaction.made:
                self._written = upto
                return
            try:
                await asyncio.to_thread(self._write, transaction)
            except JournalError as error:
                self._broken = error
                raise
            self._written, self._nothing = upto, Changes(transaction.changes.counters)
        self._then(transaction)

    def _wait_until_written(self) -> Transaction:
        made, self._made = self._made, []
        consumed, self._consumed = self._consumed, []
        return Transaction(
            snapshot.take_changes(self._rules.settings, self._rules.state), made, consumed, self._horizon()
        )
