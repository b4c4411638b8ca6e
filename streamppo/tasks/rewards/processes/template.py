"""The template process as the actor sees it: it has imported the reward, and forks on demand (see process.py)."""

import asyncio
import socket
import subprocess
import sys

from streamppo.config.reward import FunctionScorer
from streamppo.errors import TaskError
from streamppo.tasks.rewards.processes.wire import Done, Order, Ready, Setup, frame, receive_async

LOAD_S = 300.0
"""An import that takes longer has hung."""


class Template:
    """One order at a time. Raises `TaskError` if the reward cannot be loaded, or the process has died."""

    def __init__(self, config: FunctionScorer) -> None:
        self._config = config
        self._orders = asyncio.Lock()

    async def start(self) -> None:
        """Start the process and have it import the reward."""
        self._channel, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "streamppo.tasks.rewards.processes.worker", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._channel.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=self._channel)
        name, arguments = self._config.function, self._config.arguments
        self._writer.write(frame(Setup(function=name, arguments=arguments, memory_mib=self._config.memory_mib)))
        try:
            async with asyncio.timeout(LOAD_S):
                ready = await receive_async(self._reader, Ready)
        except TimeoutError as error:
            self._process.kill()
            await self.close()
            raise TaskError(f"reward.function {name!r} was not imported within {LOAD_S:g} s") from error
        except asyncio.IncompleteReadError as error:
            await self.close()
            raise TaskError(f"reward.function {name!r} ended the process that imported it") from error
        if ready.error:
            await self.close()
            raise TaskError(ready.error)

    async def fork(self, channel: socket.socket) -> int:
        """The pid of a new process that listens on `channel`."""
        return (await self._order(Order(), channel)).pid

    async def kill(self, pid: int) -> None:
        """End a process and all that it has started."""
        await self._order(Order(pid=pid))

    async def collect(self, pid: int) -> int:
        """How a process ended, which it has or will by this; a negative status is a signal."""
        return (await self._order(Order(pid=pid, collect=True))).status

    async def close(self) -> None:
        """End the template, which ends every process."""
        self._writer.close()
        await self._writer.wait_closed()
        await asyncio.to_thread(self._process.wait)

    async def _order(self, order: Order, channel: socket.socket | None = None) -> Done:
        async with self._orders:
            try:
                # A frame this short goes into the empty socket in one piece, the file descriptor with its first byte.
                socket.send_fds(self._channel, [frame(order)], [] if channel is None else [channel.fileno()])
                return await receive_async(self._reader, Done)
            except (asyncio.IncompleteReadError, OSError) as error:
                raise TaskError(f"the template process of {self._config.function!r} has died") from error
