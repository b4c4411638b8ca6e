"""Coroutines that begin before they are awaited, and rewards in the actor with a time limit."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from streamppo.config.reward import FunctionScorer
from streamppo.config.reward import Reward as Choice
from streamppo.errors import RewardFailed
from streamppo.tasks.coroutines import EagerCoroutine
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.types import Prompt, ScoredText

ASKED = "Says 7."


async def at_once() -> int:
    return 7


async def after_several_waits() -> int:
    loop, told = asyncio.get_running_loop(), list[int]()
    await asyncio.sleep(0)
    given = loop.create_future()
    loop.call_soon(given.set_result, 3)
    told.append(await given)
    refused = loop.create_future()
    loop.call_soon(refused.set_exception, ValueError("no"))
    try:
        await refused
    except ValueError:
        told.append(4)
    async with asyncio.timeout(5):
        await asyncio.sleep(0.001)
    return sum(told)


def test_what_waits_for_nothing_has_ended_and_what_waits_goes_on_as_if_it_were_awaited() -> None:
    async def story() -> None:
        assert EagerCoroutine(at_once()).result == 7
        eager = EagerCoroutine(after_several_waits())
        assert eager.result is None and await eager == 7

    asyncio.run(story())


def test_an_error_is_raised_where_it_comes_and_a_cancellation_is_the_coroutines_to_see() -> None:
    seen: list[str] = []

    async def raises(*, after_s: float | None) -> None:
        if after_s is not None:
            await asyncio.sleep(after_s)
        raise ValueError("mine")

    async def tidies() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("tidied")

    async def story() -> None:
        with pytest.raises(ValueError, match="mine"):
            EagerCoroutine(raises(after_s=None))
        with pytest.raises(ValueError, match="mine"):
            await EagerCoroutine(raises(after_s=0.001))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await EagerCoroutine(tidies())

    asyncio.run(story())
    assert seen == ["tidied"]


# --- rewards in the actor --------------------------------------------------------------------------------------


async def plain(trajectory: ScoredText) -> float:
    return 7.0


async def holds_the_loop_and_waits(trajectory: ScoredText) -> float:
    time.sleep(0.15)
    await asyncio.sleep(0.15)
    return 7.0


async def _scored(function: Callable[..., Awaitable[float]], timeout_s: float) -> float:
    name = f"{__file__}:{function.__name__}"
    rewards = Rewards(Choice(scorers={"one": FunctionScorer(function=name, where="actor", timeout_s=timeout_s)}))
    await rewards.start({""})
    text = ScoredText(prompt=ASKED, completion="7", finish="stop", num_tokens=1)
    return (await rewards.score(Prompt(text=ASKED, columns={}), text)).score


def test_a_reward_that_waits_for_nothing_sets_no_timer() -> None:
    async def story() -> None:
        loop, timers = cast(Any, asyncio.get_running_loop()), list[float]()
        real = loop.call_at
        loop.call_at = lambda when, *rest, **named: (timers.append(when), real(when, *rest, **named))[1]
        assert await _scored(plain, 30.0) == 7.0 and not timers
        assert await _scored(holds_the_loop_and_waits, 30.0) == 7.0 and timers

    asyncio.run(story())


def test_the_time_before_its_first_wait_counts() -> None:
    with pytest.raises(RewardFailed, match=r"no score after 0\.2 s"):
        asyncio.run(_scored(holds_the_loop_and_waits, 0.2))
