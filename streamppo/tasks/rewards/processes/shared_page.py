"""A memory page that tells the actor the running step of a reward's process, even of a blocked or dead process.

A blocked process that gets `LOCATE` also writes the stack of its main thread to the page.
"""

import asyncio
import faulthandler
import mmap
import os
import signal
import struct
import tempfile
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from streamppo.tasks.coroutines import observe_steps

FORMAT = struct.Struct("<QQ")
LOCATE = signal.SIGUSR2
TICK_S = 0.05
CALL: ContextVar[int] = ContextVar("CALL", default=0)
"""Number of the call to which a task belongs. The tasks that a task starts inherit its number."""
T = TypeVar("T")


class Step(NamedTuple):
    """The number of steps so far, and the call of the running step; 0 if no step runs, or a step of no call."""

    steps: int = 0
    call: int = 0


class SharedPage:
    """The page in the file of descriptor `fd`, which the caller must close."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)

    def read(self) -> Step:
        return Step(*FORMAT.unpack_from(self._memory))

    def write(self, step: Step) -> None:
        FORMAT.pack_into(self._memory, 0, *step)

    def read_stack(self) -> str:
        """Return the stack after `LOCATE`, as far as it is written."""
        return self._memory[FORMAT.size :].rstrip(b"\0").decode(errors="replace")


def create() -> int:
    """Allocate a page; return its file descriptor, which the caller must close."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("streamppo-page")
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.truncate(fd, mmap.PAGESIZE)
    return fd


def write_stack_at_signal(fd: int) -> None:
    """Make `LOCATE` write the main thread's stack to the page in the file `fd`, even while C code holds the GIL."""
    os.lseek(fd, FORMAT.size, os.SEEK_SET)
    faulthandler.register(LOCATE, fd, all_threads=False)


def mark_tasks(loop: asyncio.AbstractEventLoop, page: SharedPage) -> None:
    """Make every task of `loop` record its steps, and the loop count a step every `TICK_S`."""

    def make(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[object, object, T], **options: Any
    ) -> asyncio.Task[T]:
        marks = _Marks(page)
        return asyncio.Task(observe_steps(coroutine, marks.enter, marks.leave), loop=loop, **options)

    def tick() -> None:
        step = page.read()
        page.write(step._replace(steps=step.steps + 1))
        loop.call_later(TICK_S, tick)

    loop.set_task_factory(make)  # pyright: ignore[reportArgumentType]
    tick()


class _Marks:
    """Records the steps of one task; steps may be nested."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page
        self._before = 0

    def enter(self) -> None:
        step = self._page.read()
        self._before = step.call
        self._page.write(Step(step.steps + 1, CALL.get()))

    def leave(self) -> None:
        self._page.write(self._page.read()._replace(call=self._before))
