"""The steps of a coroutine, seen from outside: code that runs between two waits of it, and holds the event loop."""

import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Steps(Protocol):
    """Told of every step."""

    def enter(self) -> None:
        """A step begins."""
        ...

    def leave(self) -> None:
        """A step has ended."""
        ...


async def watch_steps(coroutine: Coroutine[Any, Any, T], steps: Steps) -> T:
    """Run `coroutine`, and tell `steps` of each of its steps."""
    return await _stepwise(coroutine, steps)


@types.coroutine
def _stepwise(coroutine: Coroutine[Any, Any, T], steps: Steps) -> Generator[object, object, T]:
    step: Callable[[], object] = partial(coroutine.send, None)
    while True:
        steps.enter()
        try:
            waits_for = step()
        except StopIteration as end:
            return end.value
        finally:
            steps.leave()
        try:
            step = partial(coroutine.send, (yield waits_for))
        # Also a cancellation: it is the coroutine's.
        except BaseException as error:
            step = partial(coroutine.throw, error)
