"""Finds steps of environments that block the event loop: logs and counts them, and extends other calls' deadlines.

All environments of a rollout actor share its event loop with the engine and the heartbeats. A step that computes or
sleeps without awaiting blocks all of them, and cannot be ended. The step is logged with file and line. The deadlines of
all calls except the step's are extended by its duration.
"""

import asyncio
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from streamppo.tasks import user_traceback
from streamppo.tasks.coroutines import TooLate, observe_steps, within

HELD_S = 0.5
"""A step that runs longer than this blocks the event loop."""
CHECK_S = 0.1
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    """A running step. `place` is its file and line; until the step blocks the loop, `place` is empty."""

    since_s: float
    place: str = ""


class EventLoopStalls:
    """Watches the calls of environment `name`, each bounded by `timeout_s`. Counts blocking steps by file and line."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.counts: Counter[str] = Counter()
        self.step: _Step | None = None
        self.open: dict[EnvironmentCalls, asyncio.Timeout] = {}
        self._name = name
        self._watcher: threading.Thread | None = None

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.get_task_factory() is None:
            loop.set_task_factory(_make_task)  # pyright: ignore[reportArgumentType]
        if self._watcher is None:
            arguments = (weakref.ref(self), threading.get_ident())
            self._watcher = threading.Thread(target=_check_for_ever, args=arguments, daemon=True)
            self._watcher.start()

    def check(self, thread: int) -> None:
        """Log the step running in `thread` if it blocks the loop."""
        step = self.step
        if step is not None and not step.place and time.monotonic() - step.since_s > HELD_S:
            self._warn(step, user_traceback.locate_thread(thread))

    def count_step(self, by: "EnvironmentCalls", step: _Step) -> None:
        """If a step of `by` has blocked the loop, count it and extend the deadlines of all other calls."""
        held_s = time.monotonic() - step.since_s
        if held_s <= HELD_S:
            return
        if not step.place:
            self._warn(step, "")
        self.counts[step.place] += 1
        by.held_at = step.place
        for calls, limit in self.open.items():
            when = limit.when()
            if calls is not by and when is not None and not limit.expired():
                limit.reschedule(when + held_s)

    def _warn(self, step: _Step, place: str) -> None:
        step.place = place or self._name
        if step.place not in self.counts:
            log.warning(
                "environment %s: a step at %s runs for more than %g s without awaiting, and blocks its whole actor: "
                "make it await, or run it by `await asyncio.to_thread(...)`",
                self._name,
                step.place,
                HELD_S,
            )


class EnvironmentCalls:
    """Makes the calls of one environment in turn, and observes the steps of all tasks that the calls start."""

    def __init__(self, stalls: EventLoopStalls) -> None:
        self.held_at = ""
        self._stalls = stalls
        self._before: _Step | None = None

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call. Raises `TooLate` with a reason after `timeout_s`, which includes its blocking steps."""
        stalls, self.held_at = self._stalls, ""
        stalls.begin()
        token, limit = _CALLS.set(self), asyncio.timeout(stalls.timeout_s)
        stalls.open[self] = limit
        try:
            return await within(limit, observe_steps(_awaited(call), self.enter, self.leave))
        except TooLate as error:
            place = user_traceback.locate(error)
            where = f": {self.held_at} does not await" if self.held_at else f" (at {place})" if place else ""
            raise TooLate(f"took more than {stalls.timeout_s:g} s{where}") from error
        finally:
            del stalls.open[self]
            _CALLS.reset(token)

    def enter(self) -> None:
        self._before, self._stalls.step = self._stalls.step, _Step(time.monotonic())

    def leave(self) -> None:
        step, self._stalls.step = self._stalls.step, self._before
        if step is not None:
            self._stalls.count_step(self, step)


_CALLS: ContextVar[EnvironmentCalls | None] = ContextVar("CALLS", default=None)
"""The calls of the environment to which a task belongs; tasks that it starts inherit it."""


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[object, object, T], **options: Any
) -> asyncio.Task[T]:
    calls = _CALLS.get()
    observed = coroutine if calls is None else observe_steps(coroutine, calls.enter, calls.leave)
    return asyncio.Task(observed, loop=loop, **options)


async def _awaited(call: Callable[[], Awaitable[T]]) -> T:
    return await call()


def _check_for_ever(reference: weakref.ref[EventLoopStalls], thread: int) -> None:
    while (stalls := reference()) is not None:
        stalls.check(thread)
        del stalls
        time.sleep(CHECK_S)
