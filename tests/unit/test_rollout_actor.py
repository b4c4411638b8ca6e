"""A rollout actor without Ray: what it loads, and what it refuses to go on with."""

import asyncio
from typing import Any

import pytest
import torch

from streamppo.errors import WeightsError
from streamppo.rollout import actor
from streamppo.types import encode
from streamppo.weights import buckets


class Remote:
    """A coroutine function under the name by which Ray would call it."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class Queue:
    """Serves one version; the first `damaged` pulls of it arrive with a flipped bit."""

    def __init__(self, damaged: int) -> None:
        self.damaged = damaged
        self.pulls = 0
        self.swaps: list[int] = []
        self.weights_after = Remote(self._weights_after)
        self.swapped = Remote(self._swapped)

    async def _weights_after(self, name: str, version: int) -> Any:
        if version >= 1:
            await asyncio.Event().wait()
        self.pulls += 1
        push, arrays = buckets.flatten(1, 0, {"w": torch.arange(8.0)}, 1 << 20)
        if self.pulls <= self.damaged:
            arrays[0][3] ^= 1
        return encode(push), [_value(array) for array in arrays]

    async def _swapped(self, name: str, version: int) -> None:
        self.swaps.append(version)


async def _value(array: Any) -> Any:
    return array


class Engine:
    version = 0

    async def update_weights(self, version: int, tensors: Any) -> None:
        assert torch.equal(tensors["w"], torch.arange(8.0))
        self.version = version


def following(queue: Queue) -> Any:
    """An actor of which only the part that follows the weights has been set up."""
    made: Any = actor.RolloutActor.__new__(actor.RolloutActor)
    made.name, made.queue, made.engine = "rollout-0", queue, Engine()
    made._push_ms, made._digest = 0.0, ""
    made._swapped = asyncio.Condition()
    return made


def test_damaged_weights_are_refused_and_asked_for_again(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> Queue:
        queue = Queue(damaged=actor.PULLS - 1)
        task = asyncio.create_task(following(queue)._follow_weights())
        while not queue.swaps:
            await asyncio.wait({task}, timeout=0.01)
        task.cancel()
        return queue

    queue = asyncio.run(scenario())
    assert (queue.pulls, queue.swaps) == (actor.PULLS, [1])
    assert capsys.readouterr().out.count("rollout-0: keeps version 0: push 1: bucket 0 does not match") == 2


def test_weights_that_stay_damaged_end_the_actor() -> None:
    async def scenario() -> None:
        queue = Queue(damaged=1000)
        with pytest.raises(WeightsError, match="bucket 0 does not match"):
            await following(queue)._follow_weights()
        assert (queue.pulls, queue.swaps) == (actor.PULLS, [])

    asyncio.run(scenario())
