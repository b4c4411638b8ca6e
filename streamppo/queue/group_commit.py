"""Group commit: callers that arrive while a journal transaction is written share the next one.

    changed -> commit -> drained -> written -> acknowledged

A caller's change is in the journal when its `commit` returns. A transaction without changes is skipped: an earlier one
has written them. If a write fails, its drained changes are lost: from then on every `commit` raises, and nothing is
acknowledged.
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
    """Changes, the versions `made` among them, and the trajectories that these versions consumed.

    `horizon` is taken when the changes are drained: later changes are not in the journal and may be lost in a crash.
    """

    changes: Changes
    made: Sequence[PublishedVersion]
    consumed: Sequence[Identity]
    horizon: int


class Commits:
    """Drains the changes of `rules` into transactions; calls `write` with each, in a thread, and then `written`."""

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
        """The drained changes if nothing has changed since the last transaction: only the counters."""

    def publish(self, made: PublishedVersion, consumed: Sequence[Identity]) -> None:
        """Add to the next transaction the version `made` and the trajectories that it consumed."""
        self._made.append(made)
        self._consumed += consumed

    async def commit(self) -> None:
        """Return when all changes so far are in the journal. Raises `JournalError` if writing them fails."""
        self._asked += 1
        request = self._asked
        async with self.alone:
            if self._broken is not None:
                raise self._broken
            if self._written >= request:
                return
            upto, transaction = self._asked, self._drain()
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

    def _drain(self) -> Transaction:
        versions, self._made = self._made, []
        consumed, self._consumed = self._consumed, []
        return Transaction(
            snapshot.take_changes(self._rules.settings, self._rules.state), versions, consumed, self._horizon()
        )
