"""SGLang's processes: the thread that ends them, their main function, their output, and why they failed."""

# SGLang, which brings ZeroMQ, is not installed where this project is type-checked.
# pyright: reportMissingImports=false

import asyncio
import gc
import importlib
import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, BinaryIO, TypeVar

from streamppo.process import die_with_parent

MEMORY = (
    "the model does not fit into the memory that SGLang may use: set a larger rollout.engine.mem_fraction_static, more "
    "rollout.gpus, or choose a smaller model"
)
PORT = "a port that it needs is taken"
EXPLANATIONS = (
    (r"Not enough memory|out of memory|OutOfMemoryError|mem_fraction_static|mem-fraction-static", MEMORY),
    (r"[Aa]ddress already in use|port \d+ is (already in use|not available)", PORT),
    (r"No CUDA GPUs are available|no NVIDIA driver|libcuda", "there is no GPU: rollout.gpus must be 0 on a CPU"),
    (r"No module named", "a package that SGLang needs is not installed"),
)
T = TypeVar("T")
log = logging.getLogger(__name__)


def killed(started: Iterable[BaseProcess]) -> str:
    """Return a sentence about the first of `started` that a signal has ended; "" if there is none."""
    for process in started:
        if process.exitcode is not None and process.exitcode < 0:
            return f"one of its processes was killed by {signal.Signals(-process.exitcode).name}"
    return ""


class EngineThread:
    """A thread with its own event loop; it runs from construction until `end`."""

    def __init__(self, name: str) -> None:
        self._others = {process.pid for process in multiprocessing.active_children()}
        self._other_contexts = {id(context) for context in _contexts()}
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the thread, unless it has ended."""
        if not self.has_ended:
            self._loop.call_soon_threadsafe(callback)

    @property
    def has_ended(self) -> bool:
        return self._loop.is_closed()

    def processes(self) -> list[BaseProcess]:
        """Return the running child processes that were started since this thread was made."""
        return [process for process in multiprocessing.active_children() if process.pid not in self._others]

    async def end(self) -> None:
        """Cancel the thread's work, kill its processes and end it. A second call does nothing."""
        if self.has_ended:
            return
        self._loop.call_soon_threadsafe(self._cancel_all)
        # A cancelled start may launch more processes before it stops.
        while self._thread.is_alive():
            await asyncio.to_thread(_kill, self.processes())
            await asyncio.to_thread(self._thread.join, 1.0)
        self._loop.close()

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        asyncio.gather(*tasks, return_exceptions=True).add_done_callback(self._stop)

    def _stop(self, cancelled: object) -> None:
        # Garbage collection of a context would block forever, because the context has messages to dead processes.
        for context in _contexts():
            if id(context) not in self._other_contexts:
                context.destroy(linger=0)
        self._loop.stop()


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _contexts() -> list[Any]:
    import zmq

    return [item for item in gc.get_objects() if issubclass(type(item), zmq.Context) and not item.closed]


def run(log: str, target: str, *arguments: object) -> object:
    """Call SGLang's `target` ("module:function") in a process that ends with the actor and writes to the file `log`."""
    parent = multiprocessing.parent_process()
    die_with_parent()
    if parent is not None and os.getppid() != parent.pid:
        # The parent ended before the death signal was set up.
        os._exit(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


class ProcessOutput:
    """Reads the `file` to which SGLang's processes write. `show` logs new lines if `logs_lines` is true."""

    def __init__(self, file: BinaryIO, *, logs_lines: bool) -> None:
        self._file, self._logs_lines = file, logs_lines
        self._position = 0

    def show(self) -> None:
        if not self._logs_lines:
            return
        self._file.seek(self._position)
        lines, newline, _ = self._file.read().rpartition(b"\n")
        self._position += len(lines) + len(newline)
        for line in lines.decode(errors="replace").splitlines():
            log.info("SGLang: %s", line)

    def reason(self) -> str:
        self._file.seek(0)
        return explain_failure(self._file.read().decode(errors="replace"))

    def close(self) -> None:
        self.show()
        self._file.close()


def explain_failure(output: str) -> str:
    """Explain the last error in the output of SGLang's processes in one sentence; empty if there is none."""
    errors = re.findall(r"^(?:\[[^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", output, re.MULTILINE)
    if not errors:
        return ""
    last = errors[-1].strip()
    for pattern, explanation in EXPLANATIONS:
        if re.search(pattern, last):
            return f"{explanation} ({last[:200]})"
    return last[:400]
