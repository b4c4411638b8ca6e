"""Samples an answer up to a stop string of its request. The engine does not search for these strings.

stop ["Observation:"]      "Thought: look\nObservation:" | " it rains"      the remainder is discarded
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import numpy as np

from streamppo.rollout.engine import Completion, Cuts
from streamppo.types import Ints

EVERY = 4

Generate: TypeAlias = Callable[[Cuts], Coroutine[Any, Any, Completion]]


async def until(completes: Callable[[Ints], bool], generate: Generate) -> Completion:
    """Run `generate` until `completes` is true for the tokens so far; return these tokens, or else the completion."""
    stopped: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    searched = np.zeros(0, np.int32)

    def search(part: Completion) -> Completion | None:
        nonlocal searched
        # If the engine samples the completion again, its tokens differ, and all of them are searched.
        begin = len(searched) if np.array_equal(searched, part.tokens[: len(searched)]) else 0
        searched = part.tokens
        ends = (count for count in range(begin + 1, len(searched) + 1) if completes(searched[:count]))
        return _cut_at(part, count) if (count := next(ends, 0)) else None

    def take(part: Completion) -> None:
        if not stopped.done() and (ended := search(part)) is not None:
            stopped.set_result(ended)

    sampling = asyncio.create_task(generate(Cuts(take, max_tokens=EVERY, restartable=True)))
    try:
        await asyncio.wait([sampling, stopped], return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return stopped.result()
        completion = sampling.result()
        return search(completion) or completion
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])


def _cut_at(completion: Completion, count: int) -> Completion:
    routes = completion.routes_SE
    return completion._replace(
        tokens=completion.tokens[:count],
        logprobs=completion.logprobs[:count],
        versions=completion.versions[:count],
        finish="stop",
        candidates=None if completion.candidates is None else completion.candidates.first(count),
        routes_SE=None if routes is None else routes[: len(routes) - (len(completion.tokens) - count)],
    )
