"""Group commit: callers that arrive while a journal transaction is written share the next one.

    changed -> commit -> drained -> written -> acknowledged

When `commit` returns, its caller's change is in the journal. If a write fails or is cancelled, its changes are lost,
and from then on every `commit` raises.
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
    """Changes of the queue, the `versions` published with them, and the trajectories that these versions `consumed`.

    Shards drop trajectories of prompts before `horizon`, which does not depend on later changes: a crash may lose them.
    """

    changes: Changes
    versions: Sequence[PublishedVersion]
    consumed: Sequence[Identity]
    horizon: int


class Commits:
    """Collects the changes of `rules` in transactions; calls `write` in a thread, then `written`, for each of them."""

    def __init__(
        self,
        rules: QueueRules,
        write: Callable[[Transaction], None],
        written: Callable[[Transaction], None],
        horizon: Callable[[], int],
    ) -> None:
        self._rules, self._write, self._on_written, self._horizon = rules, write, written, horizon
        self._versions: list[PublishedVersion] = []
        self._consumed: list[Identity] = []
        self._requested = self._written = 0
        self.write_lock = asyncio.Lock()
        """Held during a write to the journal."""
        self._broken: JournalError | None = None
        self._counters_only: Changes | None = None
        """The changes of an unchanged queue: the counters of the last transaction, and nothing else."""

    def publish(self, version: PublishedVersion, consumed: Sequence[Identity]) -> None:
        self._versions.append(version)
        self._consumed += consumed

    async def commit(self) -> None:
        """Wait until all changes so far are in the journal. Raises `JournalError` if a write fails."""
        self._requested += 1
        request = self._requested
        async with self.write_lock:
            if self._broken is not None:
                raise self._broken
            if self._written >= request:
                return
            last_request = self._requested
            try:
                transaction = self._drain()
                if transaction.changes == self._counters_only and not transaction.versions:
                    self._written = last_request
                    return
                await asyncio.to_thread(self._write, transaction)
            # A cancelled write goes on in its thread, beside which no other may begin.
            except BaseException as error:
                is_named = isinstance(error, JournalError)
                self._broken = error if is_named else JournalError(f"a transaction was not written: {error!r}")
                raise
            self._written, self._counters_only = last_request, Changes(transaction.changes.counters)
        self._on_written(transaction)

    def _drain(self) -> Transaction:
        versions, self._versions = self._versions, []
        consumed, self._consumed = self._consumed, []
        return Transaction(
            snapshot.take_changes(self._rules.settings, self._rules.state), versions, consumed, self._horizon()
        )
