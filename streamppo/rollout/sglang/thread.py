"""A thread of this process for SGLang: the processes started from it die with it."""

# SGLang, which brings ZeroMQ, is not installed where this project is type-checked.
# pyright: reportMissingImports=false

import asyncio
import gc
import multiprocessing
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Protocol, TypeVar

T = TypeVar("T")


class Context(Protocol):
    """A ZeroMQ context."""

    closed: bool

    def destroy(self, linger: int) -> None:
        """Close its sockets and then itself, after at most `linger` ms."""
        ...


class EngineThread:
    """A thread with its own event loop; it runs from construction until `end`."""

    def __init__(self, name: str) -> None:
        self._others = {process.pid for process in multiprocessing.active_children()}
        self._other_contexts = {id(context) for context in _contexts()}
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """Run `work` in the thread and return its result."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the thread, unless it has ended."""
        if not self.has_ended:
            self._loop.call_soon_threadsafe(callback)

    @property
    def has_ended(self) -> bool:
        """True after `end`."""
        return self._loop.is_closed()

    def processes(self) -> list[BaseProcess]:
        """The live child processes started since this thread was made."""
        return [process for process in multiprocessing.active_children() if process.pid not in self._others]

    async def end(self) -> None:
        """Cancel the thread's work, kill its processes and end it. Later calls do nothing."""
        if self.has_ended:
            return
        self._loop.call_soon_threadsafe(self._cancel_all)
        # A cancelled start may launch more processes before it stops.
        while self._thread.is_alive():
            await asyncio.to_thread(_kill, self.processes())
            await asyncio.to_thread(self._thread.join, 1.0)
        self._loop.close()

    def _cancel_all(self) -> None:
        """Cancel every task and then stop the loop. Runs in the thread."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        asyncio.gather(*tasks, return_exceptions=True).add_done_callback(self._stop)

    def _stop(self, cancelled: object) -> None:
        # The garbage collection of a context blocks for ever while it has messages to dead processes.
        for context in _contexts():
            if id(context) not in self._other_contexts:
                context.destroy(linger=0)
        self._loop.stop()


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _contexts() -> list[Context]:
    """The open ZeroMQ contexts of this process."""
    import zmq

    return [thing for thing in gc.get_objects() if issubclass(type(thing), zmq.Context) and not thing.closed]
