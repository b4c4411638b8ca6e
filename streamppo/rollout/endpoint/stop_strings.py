"""Samples an answer up to a stop string of its request, which the engine does not know.

    stop ["Observation:"]      "Thought: look\nObservation:" | " it rains"      the rest is given up

The engine hands over the tokens so far, a few at a time. The first one that completes a string is the answer's last.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import numpy as np

from streamppo.rollout.engine import Completion, Cuts
from streamppo.types import Ints

EVERY = 4
"""Tokens between two searches."""

Generate: TypeAlias = Callable[[Cuts], Coroutine[Any, Any, Completion]]


async def until(completes: Callable[[Ints], bool], generate: Generate) -> Completion:
    """Await `generate` with cuts of ours, up to the first token for which `completes(tokens up to it)` is true.

    Without a string in it, the completion is the engine's.
    """
    stopped: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    searched = np.zeros(0, np.int32)

    def look(part: Completion) -> Completion | None:
        nonlocal searched
        # A completion that is sampled again has other tokens.
        begin = len(searched) if np.array_equal(searched, part.tokens[: len(searched)]) else 0
        searched = part.tokens
        ends = (count for count in range(begin + 1, len(searched) + 1) if completes(searched[:count]))
        return _first(part, count) if (count := next(ends, 0)) else None

    def take(part: Completion) -> None:
        if not stopped.done() and (found := look(part)) is not None:
            stopped.set_result(found)

    sampling = asyncio.create_task(generate(Cuts(take, max_tokens=EVERY, restartable=True)))
    try:
        await asyncio.wait([sampling, stopped], return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return stopped.result()
        completion = sampling.result()
        return look(completion) or completion
    finally:
        sampling.cancel()
        await asyncio.wait([sampling])


def _first(whole: Completion, count: int) -> Completion:
    """The first `count` tokens of a completion, as one that has stopped there."""
    routes = whole.routes_SE
    return whole._replace(
        tokens=whole.tokens[:count],
        logprobs=whole.logprobs[:count],
        versions=whole.versions[:count],
        finish="stop",
        candidates=None if whole.candidates is None else whole.candidates.first(count),
        routes_SE=None if routes is None else routes[: len(routes) - (len(whole.tokens) - count)],
    )
