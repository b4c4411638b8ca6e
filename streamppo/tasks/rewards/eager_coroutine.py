"""Runs a coroutine up to its first wait, in the task that awaits it.

A reward that does not wait has then ended and needs no timer, which would cost more than most such rewards.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class EagerCoroutine(Generator[Any, Any, T]):
    """`ended` is the result of `coroutine` if it did not wait; else it is None, and this object must be awaited once.

    `at_s` is the event loop's time at its start. The constructor raises an error raised before the first wait.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.at_s = asyncio.get_running_loop().time()
        self._coroutine, self._goes_on = coroutine, False
        self.ended: T | None = None
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration as end:
            self.ended = end.value

    def __await__(self) -> Generator[Any, Any, T]:
        """Continue the coroutine, starting with its first wait."""
        return self

    def send(self, value: Any, /) -> Any:
        """Return its first wait, and then the coroutine's further waits."""
        if self._goes_on:
            return self._coroutine.send(value)
        self._goes_on = True
        return self._waits_for

    def throw(self, *error: Any) -> Any:
        """Raise an error or a cancellation inside the coroutine."""
        return self._coroutine.throw(*error)
