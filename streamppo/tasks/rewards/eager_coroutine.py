"""A coroutine that has run up to its first wait, in the task that is to await it.

A reward that waits for nothing has ended by then: it needs no timer, which would cost more than most such rewards.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class EagerCoroutine(Generator[Any, Any, T]):
    """`ended` is the result of `coroutine` if it has not waited; else it is None, and to be awaited, once.

    `at_s` is the event loop's time at which it began. An error that it raises before it waits is raised here.
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
        """Hand over what it waits for to the event loop, and go on with what comes of that."""
        return self

    def send(self, value: Any, /) -> Any:
        """Give its first wait, and then what the coroutine gives."""
        if self._goes_on:
            return self._coroutine.send(value)
        self._goes_on = True
        return self._waits_for

    def throw(self, *error: Any) -> Any:
        """Let the coroutine see an error, or that it is cancelled."""
        return self._coroutine.throw(*error)
