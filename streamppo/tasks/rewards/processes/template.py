"""The template process as the actor sees it: it has imported the reward, and forks on demand (see worker.py).

multiprocessing's forkserver forks as fast (15 ms; 33,000 calls/s), but after a kill -9 of its parent it lives on, with
every child that is stuck and all that such a child has started.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

from streamppo.config.reward import FunctionScorer
from streamppo.errors import TaskError
from streamppo.tasks.rewards.processes import output
from streamppo.tasks.rewards.processes.wire import LoadReward, Order, ProcessStarted, Ready, frame, receive_async

LOAD_S = 300.0
"""An import that takes longer has hung."""
CLOSE_S = 2.0
"""Time for a template to end by itself."""


async def start(config: FunctionScorer) -> "TemplateProcess":
    """Start the process and have it import the reward. Raises `TaskError` if it cannot be loaded."""
    ours, theirs = socket.socketpair()
    printed, prints = os.pipe()
    with theirs, os.fdopen(prints, "wb") as stdout:
        command = [sys.executable, "-m", "streamppo.tasks.rewards.processes.worker", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    output.forward(printed, config.function)
    ours.setblocking(False)
    template = TemplateProcess(config.function, process, ours, *await asyncio.open_connection(sock=ours))
    async with contextlib.AsyncExitStack() as on_failure:
        on_failure.push_async_callback(template.close)
        on_failure.callback(process.terminate)
        await template.load(config)
        on_failure.pop_all()
    return template


class TemplateDied(Exception):
    """There is no template process any more."""


class TemplateProcess:
    """A running template process; one order at a time. Raises `TemplateDied` if it has died."""

    def __init__(
        self,
        function: str,
        process: "subprocess.Popen[bytes]",
        channel: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._function = function
        self._process = process
        self._channel = channel
        self._reader = reader
        self._writer = writer
        self._orders = asyncio.Lock()

    async def load(self, config: FunctionScorer) -> None:
        """Have the process import the reward."""
        setup = LoadReward(function=config.function, arguments=config.arguments, memory_mib=config.memory_mib)
        self._writer.write(frame(setup))
        try:
            async with asyncio.timeout(LOAD_S):
                ready = await receive_async(self._reader, Ready)
        except TimeoutError as error:
            raise TaskError(f"reward.function {self._function!r} was not imported within {LOAD_S:g} s") from error
        except asyncio.IncompleteReadError as error:
            raise TaskError(f"reward.function {self._function!r} ended the process that imported it") from error
        if ready.error:
            raise TaskError(ready.error)

    async def fork(self, channel: socket.socket, page: int) -> int:
        """Fork a process that listens on `channel`, and notes its steps in the page behind a descriptor; its pid."""
        return (await self._order(Order(), channel.fileno(), page)).pid

    async def kill(self, pid: int) -> None:
        """End a process and all that it has started."""
        await self._order(Order(pid=pid))

    async def collect(self, pid: int) -> int:
        """Wait for the end of a process, and return its exit status; a negative one is a signal."""
        return (await self._order(Order(pid=pid, collect=True))).status

    async def close(self) -> None:
        """End the template, which ends every process."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_S)
        except subprocess.TimeoutExpired:
            # A template that is stopped, or busy, does not see that its socket has ended.
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)

    async def _order(self, order: Order, *fds: int) -> ProcessStarted:
        async with self._orders:
            try:
                # A frame this short goes into the empty socket in one piece, the file descriptors with its first byte.
                socket.send_fds(self._channel, [frame(order)], fds)
                return await receive_async(self._reader, ProcessStarted)
            except (asyncio.IncompleteReadError, OSError) as error:
                raise TemplateDied(f"the template process of {self._function!r} has died") from error
