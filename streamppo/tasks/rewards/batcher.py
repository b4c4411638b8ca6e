"""Single calls become batches: whatever waits when a place is free goes together."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from streamppo.tasks.rewards.outcome import Outcome
from streamppo.tasks.rewards.signature import Columns, Texts
from streamppo.types import ScoredText

Many: TypeAlias = Callable[[Texts, Columns], Awaitable[tuple[Outcome, ...]]]


class Batcher:
    """Up to `size` calls in a batch, up to `places` batches at once; nobody waits for a batch to fill.

    A batch that fails as a whole is tried one by one, so that one bad trajectory does not fail its neighbours.
    """

    def __init__(self, call: Many, size: int, places: int) -> None:
        self._call = call
        self._size = size
        self._places = asyncio.Semaphore(places)
        self._waiting: deque[tuple[ScoredText, dict[str, Any], asyncio.Future[Outcome]]] = deque()

    async def __call__(self, text: ScoredText, columns: dict[str, Any]) -> Outcome:
        """The outcome of one trajectory."""
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, columns, done))
        async with self._places:
            # Another's batch may have taken this call along.
            if not done.done() and self._waiting:
                await self._run([self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))])
        return await done

    async def _run(self, batch: list[tuple[ScoredText, dict[str, Any], asyncio.Future[Outcome]]]) -> None:
        texts, columns, futures = zip(*batch, strict=True)
        try:
            outcomes = await self._call(texts, columns)
            if len(batch) > 1 and all(outcome.reason for outcome in outcomes):
                outcomes = [(await self._call((text,), (row,)))[0] for text, row in zip(texts, columns, strict=True)]
        except BaseException as error:
            for future in futures:
                future.set_exception(error)
            raise
        for future, outcome in zip(futures, outcomes, strict=True):
            future.set_result(outcome)
