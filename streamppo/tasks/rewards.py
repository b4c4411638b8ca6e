"""Reward functions: loaded by name, run under a timeout; a reward that fails is failed, never 0."""

import asyncio
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from streamppo.errors import TaskError
from streamppo.types import ScoredText

Score: TypeAlias = Callable[..., Awaitable[float]]


class RewardFailed(TaskError):
    """This trajectory has no reward; the message is the reason."""


def load(name: str) -> Score:
    """The `async def` at `package.module:name`. Raises `TaskError` that says what is wrong with the name."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise TaskError(f"reward.function {name!r} is not of the form package.module:name")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise TaskError(f"reward.function {name!r}: importing {module_name} failed: {error!r}") from error
    function = getattr(module, attribute, None)
    if function is None:
        raise TaskError(f"reward.function {name!r}: {module_name} has no {attribute!r}")
    if not inspect.iscoroutinefunction(function):
        raise TaskError(f"reward.function {name!r} must be an `async def`")
    return function


async def score(function: Score, text: ScoredText, columns: Mapping[str, Any], timeout_s: float) -> float:
    """The reward of one trajectory. Raises `RewardFailed` if it raises, takes too long or is not a finite number."""
    try:
        async with asyncio.timeout(timeout_s):
            value = await function(text, **columns)
    except TimeoutError as error:
        raise RewardFailed(f"no score after {timeout_s:g} s") from error
    except Exception as error:
        raise RewardFailed(f"{type(error).__name__}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardFailed(f"returned {value!r}, not a finite number")
    return float(value)
