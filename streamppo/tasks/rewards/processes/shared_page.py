"""A page of memory that an async reward's process shares with its actor: the call whose step runs, and steps so far.

It tells a busy loop from a held one, and names the call that holds it: also while the interpreter is held and nothing
in the process can speak, or after the process has died.
"""

import asyncio
import mmap
import os
import struct
import tempfile
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from streamppo.tasks.coroutine_steps import watch_steps

FORMAT = struct.Struct("<QQ")
TICK_S = 0.05
CALL: ContextVar[int] = ContextVar("CALL", default=0)
"""Number of the call that a task belongs to; tasks of tasks inherit it."""
T = TypeVar("T")


class Step(NamedTuple):
    """`call` is 0 between two steps, and in a step that belongs to no call."""

    steps: int = 0
    call: int = 0


class SharedPage:
    """The page behind a file descriptor, which stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, FORMAT.size)

    def read(self) -> Step:
        """Return the step that runs."""
        return Step(*FORMAT.unpack_from(self._memory))

    def write(self, step: Step) -> None:
        """Note the step that runs."""
        FORMAT.pack_into(self._memory, 0, *step)


def create() -> int:
    """Make the memory of a page; its file descriptor, which is the caller's to close."""
    fd = os.memfd_create("streamppo-page") if hasattr(os, "memfd_create") else _file()
    os.truncate(fd, FORMAT.size)
    return fd


def _file() -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def mark_tasks(loop: asyncio.AbstractEventLoop, page: SharedPage) -> None:
    """Have every task of `loop` note its steps, and the loop itself that it turns."""

    def make(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
        return asyncio.Task(watch_steps(coroutine, _Marks(page)), loop=loop, **options)

    def tick() -> None:
        step = page.read()
        page.write(step._replace(steps=step.steps + 1))
        loop.call_later(TICK_S, tick)

    loop.set_task_factory(make)  # pyright: ignore[reportArgumentType]
    tick()


class _Marks:
    """Notes the steps of one task; the tasks of a loop can run inside each other."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page
        self._before = 0

    def enter(self) -> None:
        step = self._page.read()
        self._before = step.call
        self._page.write(Step(step.steps + 1, CALL.get()))

    def leave(self) -> None:
        self._page.write(self._page.read()._replace(call=self._before))
