"""The actor's side of the template process, which has imported the reward and forks on demand (worker.py).

multiprocessing's forkserver is as fast (15 ms per fork; 33,000 calls/s). But if its parent is killed by SIGKILL, the
forkserver continues, and so do its stuck children and their descendants.

The output of the processes is forwarded with a bound, because user code may print any amount. Each line gets the prefix
`reward FUNCTION: `, so that it cannot imitate one of our log lines.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from io import FileIO

from streamppo.config.reward import FunctionScorer
from streamppo.errors import TaskError
from streamppo.process import LINE_BYTES
from streamppo.tasks.rewards.processes.wire import LoadReward, Order, ProcessStarted, Ready, frame, receive_async
from streamppo.terminal import harmless

LOAD_S = 300.0
"""Time limit for the import of the reward."""
CLOSE_S = 2.0
"""Time for a template to end by itself before it is terminated."""
WINDOW_S = 60.0
WINDOW_BYTES = 64 * 2**10
"""Bytes of output that are forwarded in `WINDOW_S` seconds, for all processes of a reward together; more is dropped."""

log = logging.getLogger(__name__)


async def start(config: FunctionScorer) -> "TemplateProcess":
    """Start the process and let it import the reward. Raises `TaskError` if the import fails."""
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
            # As in Ray's workers. A fork would wait forever for OpenMP threads that the import has started.
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    forward_output(printed, config.function)
    ours.setblocking(False)
    template = TemplateProcess(config.function, process, ours, *await asyncio.open_connection(sock=ours))
    async with contextlib.AsyncExitStack() as on_failure:
        on_failure.push_async_callback(template.close)
        on_failure.callback(process.terminate)
        await template.load(config)
        on_failure.pop_all()
    return template


class TemplateDied(Exception):
    """The template process has died."""


class TemplateProcess:
    """A running template process, which takes one order at a time. After its death all methods raise `TemplateDied`."""

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
        """Fork a process with the socket `channel` and the page of descriptor `page`; return its pid."""
        return (await self._order(Order(), channel.fileno(), page)).pid

    async def kill(self, pid: int) -> None:
        await self._order(Order(pid=pid))

    async def collect(self, pid: int) -> int:
        """Wait for the end of a process; return its exit status (negative: a signal)."""
        return (await self._order(Order(pid=pid, collect=True))).status

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_S)
        except subprocess.TimeoutExpired:
            # A stopped or busy template does not notice that its socket was closed.
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)

    async def _order(self, order: Order, *fds: int) -> ProcessStarted:
        async with self._orders:
            try:
                # A frame this short is sent in one piece, with the file descriptors attached to its first byte.
                socket.send_fds(self._channel, [frame(order)], fds)
                return await receive_async(self._reader, ProcessStarted)
            except (asyncio.IncompleteReadError, OSError) as error:
                raise TemplateDied(f"the template process of {self._function!r} has died") from error


def forward_output(source: int, function: str) -> None:
    """Forward `source` to standard output in a thread, until every writer has closed `source`; then close it."""
    try:
        target = os.dup(1)
    except OSError:
        # Without a standard output the pipe must still be read, or its writers would block.
        target = os.open(os.devnull, os.O_WRONLY)
    threading.Thread(target=_copy_lines, args=(source, target, function), name="reward-output", daemon=True).start()


def _copy_lines(source: int, target: int, function: str) -> None:
    begin, passed, line = time.monotonic(), 0, b""
    head = f"reward {harmless(function)}: ".encode()
    with os.fdopen(source, "rb", buffering=0) as read, os.fdopen(target, "wb", buffering=0) as write:
        while chunk := read.read(2**16):
            if time.monotonic() - begin > WINDOW_S:
                begin, passed = time.monotonic(), 0
            forwarded = chunk[: max(0, WINDOW_BYTES - passed)]
            if passed <= WINDOW_BYTES < passed + len(chunk):
                log.warning("%s prints more than %d KiB a minute: the rest is dropped", function, WINDOW_BYTES // 2**10)
            passed += len(chunk)
            *lines, line = (line + forwarded).split(b"\n")
            while len(line) > LINE_BYTES:
                lines, line = [*lines, line[:LINE_BYTES]], line[LINE_BYTES:]
            _write(write, b"".join(_sanitise(complete_line, head) for complete_line in lines))
        if line:
            _write(write, _sanitise(line, head))


def _sanitise(line: bytes, head: bytes) -> bytes:
    return head + harmless(line.removesuffix(b"\r").decode(errors="replace")).encode() + b"\n"


def _write(target: FileIO, chunk: bytes) -> None:
    """Write all of `chunk`; stop if standard output is closed."""
    try:
        while chunk:
            chunk = chunk[target.write(chunk) :]
    except OSError:
        return
