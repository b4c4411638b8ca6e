"""Runs users' coroutines: within a time limit, with calls before and after each step, or at once up to the first wait.

A step is the code between two waits of a coroutine; it blocks the event loop. A coroutine may swallow its cancellation.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class TooLate(Exception):
    """A call exceeded its time limit."""


async def within(limit: asyncio.Timeout, call: Awaitable[T]) -> T:
    """Await `call` within `limit`. Raises `TooLate` if `call` ends after the limit, even if `call` returns a value."""
    try:
        async with limit:
            result = await call
    except TimeoutError as error:
        if limit.expired():
            raise TooLate from error
        raise
    end_s = limit.when()
    # A call may return late: its bare `except` swallows the cancellation, and its last step cannot be cancelled.
    if end_s is not None and asyncio.get_running_loop().time() > end_s:
        raise TooLate
    return result


async def observe_steps(
    coroutine: Coroutine[object, object, T], enter: Callable[[], None], leave: Callable[[], None]
) -> T:
    """Run `coroutine`; call `enter` before each of its steps and `leave` after it."""
    # A task accepts an `async def`, but not the generator of `types.coroutine`.
    return await _step_by_step(coroutine, enter, leave)


@types.coroutine
def _step_by_step(
    coroutine: Coroutine[object, object, T], enter: Callable[[], None], leave: Callable[[], None]
) -> Generator[object, object, T]:
    step: Callable[[], object] = partial(coroutine.send, None)
    while True:
        enter()
        try:
            wait = step()
        except StopIteration as end:
            return end.value
        finally:
            leave()
        try:
            step = partial(coroutine.send, (yield wait))
        # Raise the error, which may be a cancellation, inside the coroutine.
        except BaseException as error:
            step = partial(coroutine.throw, error)


class EagerCoroutine(Generator[object, object, T]):
    """Runs `coroutine` up to its first wait at once, and the remainder in the task that awaits this object.

    A reward that never waits needs no timer then. A timer would cost more than most such rewards. If the coroutine ends
    without a wait, `result` is its result. Otherwise `result` is None, and this object must be awaited once. `start_s`
    is the event loop's time at the start. The constructor passes on an error raised before the first wait.
    """

    def __init__(self, coroutine: Coroutine[object, object, T]) -> None:
        self.start_s = asyncio.get_running_loop().time()
        self._coroutine, self._is_resumed = coroutine, False
        self.result: T | None = None
        try:
            self._first_wait = coroutine.send(None)
        except StopIteration as end:
            self.result = end.value

    def __await__(self) -> Generator[object, object, T]:
        return self

    def send(self, value: object, /) -> object:
        """Resume the coroutine and return its next wait; the first call only returns the first wait."""
        if self._is_resumed:
            return self._coroutine.send(value)
        self._is_resumed = True
        return self._first_wait

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)
