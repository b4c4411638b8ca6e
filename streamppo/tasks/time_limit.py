"""A time limit on a user's coroutine, which may swallow its cancellation."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class TooLate(Exception):
    """A call exceeded its time limit."""


async def within(limit: asyncio.Timeout, call: Awaitable[T]) -> T:
    """Await `call` within `limit`. Raises `TooLate` beyond it, whatever the call returns.

    A `TimeoutError` of the call itself is passed on.
    """
    try:
        async with limit:
            answer = await call
    except TimeoutError as error:
        if limit.expired():
            raise TooLate from error
        raise
    end_s = limit.when()
    # A bare `except` swallows a cancellation, and the last step of a call cannot be cancelled.
    if end_s is not None and asyncio.get_running_loop().time() > end_s:
        raise TooLate
    return answer
