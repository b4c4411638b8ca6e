"""Steps of environments that hold the event loop: named while they last, counted, and charged to nobody else.

All environments of a rollout actor share its event loop with its engine and its signs of life. A step that computes or
sleeps without awaiting holds them all, and nothing can end it. So it is logged with its file and line, its own call has
no more time for it, and every other call gets that time back.
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
from streamppo.tasks.coroutine_steps import watch_steps

HELD_S = 0.5
"""A step that runs for longer holds the event loop."""
LOOK_S = 0.1
T = TypeVar("T")
log = logging.getLogger(__name__)


class TooLate(Exception):
    """A call that did not end in time."""


@dataclass(slots=True)
class _Step:
    """A step that runs; `place` is its file and line once it holds the loop."""

    since_s: float
    place: str = ""


class EventLoopStalls:
    """Calls of the environments called `name`, each bounded by `timeout_s`; `counts` are stalls by file and line."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.counts: Counter[str] = Counter()
        self.step: _Step | None = None
        self.open: dict[EnvironmentCalls, asyncio.Timeout] = {}
        self._name = name
        self._watcher: threading.Thread | None = None

    def begin(self) -> None:
        """Watch the event loop that runs in this thread."""
        loop = asyncio.get_running_loop()
        if loop.get_task_factory() is None:
            loop.set_task_factory(_make_task)  # pyright: ignore[reportArgumentType]
        if self._watcher is None:
            arguments = (weakref.ref(self), threading.get_ident())
            self._watcher = threading.Thread(target=_look_for_ever, args=arguments, daemon=True)
            self._watcher.start()

    def look(self, thread: int) -> None:
        """Name the step that runs in `thread`, if it holds the loop."""
        step = self.step
        if step is not None and not step.place and time.monotonic() - step.since_s > HELD_S:
            self._warn(step, user_traceback.locate_thread(thread))

    def count_step(self, by: "EnvironmentCalls", step: _Step) -> None:
        """Count a step of `by`, and give everybody else the time back if it has held the loop."""
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
                "environment %s: a step at %s runs for more than %g s without awaiting, and holds its whole actor: "
                "let it await, or put it into `await asyncio.to_thread(...)`",
                self._name,
                step.place,
                HELD_S,
            )


class EnvironmentCalls:
    """The calls of one environment, one after another, and the steps of all tasks that it starts in them."""

    def __init__(self, stalls: EventLoopStalls) -> None:
        self.held_at = ""
        self._stalls = stalls
        self._before: _Step | None = None

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call. Raises `TooLate`, in words, if it takes longer than `timeout_s`; its stalls count."""
        stalls, self.held_at = self._stalls, ""
        stalls.begin()
        token, limit = _CALLS.set(self), asyncio.timeout(stalls.timeout_s)
        try:
            async with limit:
                stalls.open[self] = limit
                answer = await watch_steps(_awaited(call), self)
        except TimeoutError as error:
            # Any other one is the environment's own.
            if limit.expired():
                raise self._too_late() from error
            raise
        finally:
            del stalls.open[self]
            _CALLS.reset(token)
        end_s = limit.when()
        # The last step of a call cannot be cancelled.
        if end_s is not None and asyncio.get_running_loop().time() > end_s:
            raise self._too_late()
        return answer

    def _too_late(self) -> TooLate:
        held = f": {self.held_at} does not await" if self.held_at else ""
        return TooLate(f"took more than {self._stalls.timeout_s:g} s{held}")

    def enter(self) -> None:
        """A step begins."""
        self._before, self._stalls.step = self._stalls.step, _Step(time.monotonic())

    def leave(self) -> None:
        """A step has ended."""
        step, self._stalls.step = self._stalls.step, self._before
        if step is not None:
            self._stalls.count_step(self, step)


_CALLS: ContextVar[EnvironmentCalls | None] = ContextVar("CALLS", default=None)
"""The environment that a task belongs to; tasks of tasks inherit it."""


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
    calls = _CALLS.get()
    return asyncio.Task(coroutine if calls is None else watch_steps(coroutine, calls), loop=loop, **options)


async def _awaited(call: Callable[[], Awaitable[T]]) -> T:
    return await call()


def _look_for_ever(found: weakref.ref[EventLoopStalls], thread: int) -> None:
    while (stalls := found()) is not None:
        stalls.look(thread)
        del stalls
        time.sleep(LOOK_S)
