"""Killable processes for one reward, as the actor sees them.

consumes     calls
produces     outcomes; a call that does not end in time, or whose process dies, is a failure with its reason
waits for    a free process: sync rewards have one call in each, async ones all calls in one
unblocks     by killing: a stuck process is replaced by a fork of the template, which is there in milliseconds

A shared process that has to be killed may hold other calls: each of its calls is run again in a process of its own, so
that the guilty call is told from its neighbours.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Coroutine

from streamppo.config.reward import FunctionScorer
from streamppo.errors import TaskError
from streamppo.tasks.rewards.outcome import Outcome, too_late
from streamppo.tasks.rewards.processes import template
from streamppo.tasks.rewards.processes.template import Template
from streamppo.tasks.rewards.processes.wire import UNSENDABLE, Answer, Call, frame, receive_async
from streamppo.tasks.rewards.signature import Columns, Texts

GRACE_S = 0.2
"""An async process ends its calls by its own clock; it is stuck if it has not done so after this."""


class Lost(Exception):
    """The process was ended while several calls were in it."""


class Process:
    """One forked process, and the calls on their way to it, by number."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.reader = reader
        self.writer = writer
        self.calls: dict[int, asyncio.Future[tuple[Outcome, ...]]] = {}
        self.ended = False
        self.killed = False

    async def ask(self, call: Call, timeout_s: float) -> tuple[Outcome, ...]:
        """Send a call and wait for its answer.

        Raises `TimeoutError` if none comes in time, `Lost` if the process ends with several calls in it.
        """
        answer: asyncio.Future[tuple[Outcome, ...]] = asyncio.get_running_loop().create_future()
        self.calls[call.number] = answer
        try:
            self.writer.write(frame(call))
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self.calls[call.number]

    async def listen(self) -> None:
        """Hand answers to the calls that wait for them, until the process is gone."""
        try:
            while True:
                answer = await receive_async(self.reader, Answer)
                waiting = self.calls.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer.outcomes)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def fail_calls(self, status: int) -> None:
        """Fail the calls that still wait in a process that is gone. Only a call that was alone in it can be blamed."""
        reason = f"its process died: {_ending(status)}"
        for waiting in self.calls.values():
            if waiting.done():
                continue
            if len(self.calls) == 1 and not self.killed:
                waiting.set_result((Outcome(reason=reason),))
            else:
                waiting.set_exception(Lost())


async def start(config: FunctionScorer, is_async: bool) -> "Pool":
    """Load the reward and fork its processes. Raises `TaskError` if it cannot be loaded."""
    pool = Pool(config, is_async, await template.start(config))
    async with contextlib.AsyncExitStack() as on_failure:
        on_failure.push_async_callback(pool.close)
        await pool.fill()
        on_failure.pop_all()
    return pool


class Pool:
    """The processes of one reward. `call` may be called from any number of coroutines."""

    def __init__(self, config: FunctionScorer, is_async: bool, template: Template) -> None:
        self.respawns = 0
        self._config = config
        self._is_async = is_async
        self._template = template
        self._free: asyncio.Queue[Process] = asyncio.Queue()
        self._alone = asyncio.Semaphore(config.processes)
        self._shared: Process | None = None
        self._number = 0
        self._broken: TaskError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def fill(self) -> None:
        """Fork the processes: one for all calls of an async reward, else as many as calls may run at once."""
        for _ in range(1 if self._is_async else self._config.processes):
            self._offer(await self._spawn(respawn=True))

    async def call(self, texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
        """Return one outcome for each text."""
        process = await self._free.get()
        if self._broken is not None:
            self._free.put_nowait(process)
            raise self._broken
        if not self._is_async:
            return await self._exclusively(process, texts, columns)
        self._free.put_nowait(process)
        try:
            return await self._ask(process, texts, columns)
        except Lost:
            pass
        async with self._alone:
            process = await self._spawn(respawn=False)
            try:
                return await self._ask(process, texts, columns)
            finally:
                self._end(process)

    async def _exclusively(self, process: Process, texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
        """Keep every other call out of the process until this one has ended."""
        try:
            outcomes = await self._ask(process, texts, columns)
        except BaseException:
            self._end(process)
            raise
        if not process.ended:
            self._free.put_nowait(process)
        return outcomes

    async def _ask(self, process: Process, texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
        self._number += 1
        timeout_s = self._config.timeout_s
        call = Call(number=self._number, texts=texts, columns=columns, timeout_s=timeout_s)
        try:
            outcomes = await process.ask(call, timeout_s + GRACE_S * self._is_async)
        except TimeoutError:
            self._end(process)
            outcomes = (too_late(timeout_s),)
        except UNSENDABLE as error:
            outcomes = (Outcome(reason=f"its row cannot be sent to another process: {error}"),)
        return outcomes if len(outcomes) == len(texts) else outcomes[:1] * len(texts)

    # --- processes -------------------------------------------------------------------------------------------

    async def _spawn(self, *, respawn: bool) -> Process:
        mine, theirs = socket.socketpair()
        with theirs:
            pid = await self._template.fork(theirs)
        mine.setblocking(False)
        process = Process(pid, *await asyncio.open_connection(sock=mine))
        self._keep(self._live(process, respawn))
        return process

    async def _live(self, process: Process, respawn: bool) -> None:
        """Follow a process from its birth to its end, and start its successor."""
        try:
            await process.listen()
        finally:
            process.writer.close()
        self._retire(process)
        try:
            process.fail_calls(await self._template.collect(process.pid))
            if respawn:
                self.respawns += 1
                process = await self._spawn(respawn=True)
        except TaskError as error:
            self._broken = error
            process.fail_calls(-signal.SIGKILL)
        if respawn:
            self._offer(process)

    def _offer(self, process: Process) -> None:
        """Let calls go to a process; that of an async reward stays in the queue while they do."""
        self._shared = process if self._is_async else None
        self._free.put_nowait(process)

    def _end(self, process: Process) -> None:
        """Kill a process; `_live` sees its socket close."""
        if not process.ended:
            process.killed = True
            self._retire(process)
            self._keep(self._kill(process.pid))

    def _retire(self, process: Process) -> None:
        """Let no call go to a process any more."""
        if process is self._shared:
            self._shared = None
            self._free.get_nowait()
        process.ended = True

    async def _kill(self, pid: int) -> None:
        # If the template has died, `_live` says so.
        with contextlib.suppress(TaskError):
            await self._template.kill(pid)

    def _keep(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End every process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._template.close()


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
