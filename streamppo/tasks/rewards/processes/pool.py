"""The killable processes of one reward, on the actor's side.

consumes     calls
produces     outcomes; a call that does not end in time, or whose process dies, is a failure with its reason
waits for    a process: sync rewards have one call in each, async ones all calls in one
unblocks     by killing: a stuck process is replaced by a fork of the template within milliseconds

    sync         free -> one call -> free | ended -> replaced before its next call
    async        shared -> held: one step of a call has run too long; only this call stays in the process until its
                 time is over, and all other calls restart at once, together, in a new process

`timeout_s` bounds the sum of a call's times in all processes. A process whose steps are short is never held.
"""

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod

from streamppo.config.reward import FunctionScorer
from streamppo.tasks.columns import pack
from streamppo.tasks.rewards.outcome import Outcome, too_late
from streamppo.tasks.rewards.processes import template
from streamppo.tasks.rewards.processes.forks import Forks
from streamppo.tasks.rewards.processes.process import CallLost, Orphaned, Process
from streamppo.tasks.rewards.processes.wire import UNSENDABLE, Call
from streamppo.tasks.rewards.signature import Columns, Texts

HELD_SHARE, HELD_MIN_S, HELD_MAX_S = 0.1, 0.25, 2.0
"""A step holds its process if it runs for `HELD_SHARE` of the call's time limit, clamped to the two bounds."""
CHECKS = 4
"""A running step is checked this many times before it counts as holding its process."""
HELD_AT_ONCE = 16
"""Maximum number of held processes. If one more process is held, it keeps all its calls."""
ALONE = 16
"""Maximum number of concurrent calls with a process each, because they may have ended a shared process."""
LIVES = 3
"""Number of tries of a call if the template dies during each."""

log = logging.getLogger(__name__)


async def start(config: FunctionScorer, is_async: bool) -> "Pool":
    """Load the reward and fork its processes. Raises `TaskError` if the reward cannot be loaded."""
    forks = Forks(config, await template.start(config))
    pool = _SharedProcess(config, forks) if is_async else _Exclusive(config, forks)
    async with contextlib.AsyncExitStack() as on_failure:
        on_failure.push_async_callback(pool.close)
        await pool.fill()
        on_failure.pop_all()
    return pool


class Pool(ABC):
    """The processes of one reward. Any number of coroutines may call `call`."""

    def __init__(self, config: FunctionScorer, forks: Forks) -> None:
        self.respawns = 0
        self._config = config
        self._forks = forks
        self._grace_s = 0.0
        """Seconds after a call's time limit during which its answer is still accepted."""
        self._number = 0

    @abstractmethod
    async def fill(self) -> None:
        """Fork the initial processes."""

    @abstractmethod
    async def run(self, texts: Texts, columns: Columns, remaining_s: float) -> tuple[Outcome, ...]:
        """Run a call in a process. Raises `CallLost` and `Orphaned`."""

    async def call(self, texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
        """Return one outcome for each text. Raises `TaskError` if a process can no longer be forked."""
        for _ in range(LIVES):
            try:
                return await self.run(texts, columns, self._config.timeout_s)
            except Orphaned:
                continue
        return (Outcome(reason=f"the template process died during each of {LIVES} tries", whole=True),) * len(texts)

    async def close(self) -> None:
        await self._forks.close()

    async def _ask(self, process: Process, texts: Texts, columns: Columns, remaining_s: float) -> tuple[Outcome, ...]:
        """Run a call in `process`; end the process if the call exceeds its time and holds the process."""
        self._number += 1
        try:
            call = Call(
                number=self._number,
                texts=texts,
                columns=tuple({name: pack(value) for name, value in row.items()} for row in columns),
                timeout_s=remaining_s,
                limit_s=self._config.timeout_s,
            )
            outcomes = await process.ask(call, grace_s=self._grace_s)
        except UNSENDABLE as error:
            reason = f"its row cannot be sent to another process: {error}"
            return (Outcome(reason=reason, whole=True),) * len(texts)
        if outcomes is None:
            place = ""
            if process.held:
                place = await process.locate()
                self._forks.end(process)
            # Only the processes of async rewards have a grace period, to tell a blocked event loop from a slow call.
            held = process.held and self._grace_s > 0
            return (too_late(self._config.timeout_s, place, held=held),) * len(texts)
        self._forks.template_deaths = 0
        return outcomes if len(outcomes) == len(texts) else outcomes[:1] * len(texts)


class _Exclusive(Pool):
    """The processes of a sync reward: each has one call at a time."""

    def __init__(self, config: FunctionScorer, forks: Forks) -> None:
        super().__init__(config, forks)
        self._free: asyncio.Queue[Process] = asyncio.Queue()

    async def fill(self) -> None:
        for _ in range(self._config.processes):
            self._free.put_nowait(await self._forks.fork())

    async def run(self, texts: Texts, columns: Columns, remaining_s: float) -> tuple[Outcome, ...]:
        process = await self._free.get()
        try:
            if process.ended:
                process = await self._forks.fork()
                self.respawns += 1
            return await self._ask(process, texts, columns, remaining_s)
        # The process is still busy with a call that was cancelled or has failed, so end it.
        except BaseException:
            self._forks.end(process)
            raise
        finally:
            self._free.put_nowait(process)


class _SharedProcess(Pool):
    """The process of an async reward, which runs all calls at once, each with its own time limit."""

    def __init__(self, config: FunctionScorer, forks: Forks) -> None:
        super().__init__(config, forks)
        self._held_s = self._grace_s = min(HELD_MAX_S, max(HELD_MIN_S, HELD_SHARE * config.timeout_s))
        self._process: Process | None = None
        self._replacing = asyncio.Lock()
        self._alone = asyncio.Semaphore(ALONE)
        self._num_held = 0
        self._warned = False

    async def fill(self) -> None:
        await self._current()

    async def run(self, texts: Texts, columns: Columns, remaining_s: float) -> tuple[Outcome, ...]:
        while remaining_s > 0:
            process = await self._current()
            begin = time.monotonic()
            try:
                return await self._ask(process, texts, columns, remaining_s)
            except CallLost as lost:
                remaining_s -= time.monotonic() - begin
                if not lost.innocent:
                    return await self._run_alone(texts, columns, remaining_s)
        return (too_late(self._config.timeout_s),) * len(texts)

    async def _run_alone(self, texts: Texts, columns: Columns, remaining_s: float) -> tuple[Outcome, ...]:
        """Run a call alone in a process: the call may have ended the shared process, and must not end other calls."""
        async with self._alone:
            process = await self._forks.fork()
            try:
                return await self._ask(process, texts, columns, remaining_s)
            except CallLost:
                return (too_late(self._config.timeout_s),) * len(texts)
            finally:
                self._forks.end(process)

    async def _current(self) -> Process:
        async with self._replacing:
            if self._process is None or self._process.ended or self._process.held:
                self.respawns += self._process is not None
                self._process = await self._forks.fork()
                self._forks.keep(self._watch(self._process))
            return self._process

    async def _watch(self, process: Process) -> None:
        """Detect a call that holds the process, and move all other calls to a new process."""
        previous, since_s = process.page.read(), time.monotonic()
        while not process.ended:
            await asyncio.sleep(self._held_s / CHECKS)
            step = process.page.read()
            if step != previous:
                previous, since_s = step, time.monotonic()
                continue
            held = time.monotonic() - since_s > self._held_s and self._num_held < HELD_AT_ONCE
            if held and step.call not in process.calls:
                # The actor has given up the call that holds the process, or the running code belongs to no call.
                if step.call:
                    process.leave_to(step.call)
                return self._forks.end(process)
            if held and len(process.calls) > 1:
                return await self._isolate(process, step.call)

    async def _isolate(self, process: Process, culprit: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: a call runs for more than %g s without awaiting: %d other calls restart in a new process",
                self._config.function,
                self._held_s,
                len(process.calls) - 1,
            )
        answer = process.calls[culprit]
        process.leave_to(culprit)
        self._num_held += 1
        try:
            await asyncio.wait((answer,), timeout=self._config.timeout_s)
        finally:
            self._num_held -= 1
            self._forks.end(process)
