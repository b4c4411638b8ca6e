"""Observes the steps of a coroutine: the code between two of its waits, which blocks the event loop."""

import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Steps(Protocol):
    """Observer of steps."""

    def enter(self) -> None:
        """Called before a step."""
        ...

    def leave(self) -> None:
        """Called after a step."""
        ...


async def watch_steps(coroutine: Coroutine[Any, Any, T], steps: Steps) -> T:
    """Run `coroutine`; call `steps` before and after each of its steps."""
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
        # A cancellation too must reach the coroutine.
        except BaseException as error:
            step = partial(coroutine.throw, error)
