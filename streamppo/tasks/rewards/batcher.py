"""Batches single calls: all waiting calls are sent together when a place is free."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import NamedTuple, TypeAlias

from streamppo.tasks.dataset_files import Row
from streamppo.tasks.rewards.outcome import Outcome
from streamppo.tasks.rewards.signature import Columns, Texts
from streamppo.types import ScoredText

CallBatch: TypeAlias = Callable[[Texts, Columns], Coroutine[object, object, tuple[Outcome, ...]]]
"""Scores several trajectories: returns one outcome for each text."""
CallOne: TypeAlias = Callable[[ScoredText, Row], Awaitable[Outcome]]


class _Waiting(NamedTuple):
    text: ScoredText
    columns: Row
    done: asyncio.Future[Outcome]


class Batcher:
    """Sends up to `size` calls per batch and up to `places` batches concurrently; no call waits for a batch to fill.

    If a batch raises, dies or takes too long, its trajectories are scored one by one, so that none fails the
    others. After a retryable failure the caller retries instead. A returned value is final, even if it is invalid.
    """

    def __init__(self, call: CallBatch, size: int, places: int) -> None:
        self._call = call
        self._size = size
        self._places = asyncio.Semaphore(places)
        self._line: deque[_Waiting] = deque()

    async def __call__(self, text: ScoredText, columns: Row) -> Outcome:
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._line.append(_Waiting(text, columns, done))
        async with self._places:
            # The batch of another call may already have scored this trajectory.
            if not done.done() and self._line:
                await self._run([self._line.popleft() for _ in range(min(self._size, len(self._line)))])
        return await done

    async def _run(self, batch: list[_Waiting]) -> None:
        texts = tuple(waiting.text for waiting in batch)
        columns = tuple(waiting.columns for waiting in batch)
        try:
            outcomes = await self._call(texts, columns)
            if len(batch) > 1 and all(outcome.whole and not outcome.retryable for outcome in outcomes):
                outcomes = [(await self._call((waiting.text,), (waiting.columns,)))[0] for waiting in batch]
        # The batch's other calls wait for this call: raise its error or cancellation in them too.
        except BaseException as error:
            for waiting in batch:
                waiting.done.set_exception(error)
            raise
        for waiting, outcome in zip(batch, outcomes, strict=True):
            waiting.done.set_result(outcome)
