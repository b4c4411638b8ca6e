"""Sandboxes for programs of agents: a protocol, and bubblewrap with a connection to the run's endpoint.

    program -> 127.0.0.1:PORT of the sandbox -> its listening socket, which this process has -> endpoint

The network of the sandbox has only a loopback interface. Before the program begins, a script in the sandbox listens at
the endpoint's port and sends the listening socket to this process. This process relays each connection to the endpoint.
The program has no other connection, and no keys of other runs.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from streamppo.config.task import AnySandbox, BubblewrapSandbox, CustomSandbox
from streamppo.errors import TaskError
from streamppo.tasks import plugins
from streamppo.tasks.scorers import bubblewrap
from streamppo.tasks.scorers.capture import Ran, RunLimits

CONNECTIONS = 256
"""Maximum number of a program's connections that are relayed concurrently."""
CHUNK_BYTES = 2**16
ADDRESS_MIB = 2**22
"""A high limit on the address space of one process, because Node and Java reserve far more than they use."""
ALTERNATIVE = (
    "Otherwise name another sandbox, environment.sandbox = { kind = 'class', ... }, or run the agent as your user, "
    "without a sandbox."
)
HINT = "add it, or its folder, to environment.sandbox.files"
PATH = os.pathsep.join((os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"))
PROGRAM = """
import os, socket, sys
words, variables, port, channel = {job!r}
with socket.create_server(("127.0.0.1", port), backlog=128) as listening, socket.socket(fileno=channel) as outside:
    socket.send_fds(outside, [b"1"], [listening.fileno()])
os.environ.update(variables)
try:
    os.execvp(words[0], words)
except OSError as error:
    sys.exit(f"{{words[0]!r}} cannot be started: {{error}}")
"""
"""The script that starts in the sandbox. The agent's program then replaces the script in the same process."""


class AgentProgram(NamedTuple):
    """One run of a program. `address` is the endpoint's URL as seen from outside the sandbox, without /v1."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    address: str
    timeout_s: float


class AgentSandbox(Protocol):
    """Runs programs of agents; a client of a remote service may implement it."""

    async def run(self, program: AgentProgram) -> Ran:
        """Run a program to its end or to its time limit. Raises an exception only if the sandbox itself fails."""
        ...


def build(config: AnySandbox) -> AgentSandbox:
    """Make the configured sandbox. Raises `TaskError` if the sandbox does not work here."""
    match config:
        case BubblewrapSandbox():
            return AgentBubblewrap(config)
        case CustomSandbox(name=name, arguments=arguments):
            subject = f"environment.sandbox {name!r}"
            factory = plugins.function(name, "environment.sandbox")
            plugins.check_arguments(factory, arguments, subject)
            return cast(AgentSandbox, plugins.call(subject, partial(factory, **arguments)))


class AgentBubblewrap:
    """Runs programs of agents in bubblewrap. Raises `TaskError` if bubblewrap does not work, or a file is missing."""

    def __init__(self, config: BubblewrapSandbox) -> None:
        if missing := bubblewrap.problem(ALTERNATIVE):
            raise TaskError(missing)
        self._config = config
        self._files = [os.path.abspath(file) for file in config.files]
        if absent := [file for file in self._files if not os.path.exists(file)]:
            raise TaskError(f"environment.sandbox.files has {absent[0]!r}, which is not a file or folder here")

    def check_command(self, words: tuple[str, ...]) -> None:
        """Raise `TaskError` if the sandbox lacks the command's program, or a file among its arguments."""
        program = shutil.which(self._absolute(words[0]), path=PATH)
        if program is None:
            raise TaskError(f"environment.command begins with {words[0]!r}, which its sandbox lacks: {HINT}")
        for word in (program, *words[1:]):
            if os.path.isfile(word) and not self._sees(word):
                raise TaskError(f"environment.command names {word!r}, which its sandbox lacks: {HINT}")

    async def run(self, program: AgentProgram) -> Ran:
        address = urlsplit(program.address)
        outer, inner = socket.socketpair()
        with outer, inner:
            assert address.hostname is not None and address.port is not None
            relaying = asyncio.create_task(_relay_connections(outer, address.hostname, address.port))
            try:
                return await asyncio.to_thread(self._run, program, inner.fileno(), address.port)
            finally:
                relaying.cancel()
                await asyncio.gather(relaying, return_exceptions=True)

    def _run(self, program: AgentProgram, channel: int, port: int) -> Ran:
        # In the sandbox the address of the endpoint is always 127.0.0.1.
        inner_address = f"http://127.0.0.1:{port}"
        variables = {name: value.replace(program.address, inner_address) for name, value in program.variables.items()}
        job = ([self._absolute(word) for word in program.words], variables, port, channel)
        return bubblewrap.run(
            PROGRAM.format(job=job),
            "",
            RunLimits(program.timeout_s, self._config.memory_mib),
            disk_bytes=self._config.disk_mib * 2**20,
            env={"PATH": PATH, "TMPDIR": "/tmp"},
            files=self._files,
            inherits=(channel,),
            address_mib=ADDRESS_MIB,
        )

    def _absolute(self, word: str) -> str:
        """Make the path of a configured file absolute: the program starts in another folder."""
        path = os.path.abspath(word)
        within = any(Path(path).is_relative_to(file) for file in self._files)
        return path if within and os.path.exists(path) else word

    def _sees(self, word: str) -> bool:
        system = ("/usr", "/bin", "/sbin", "/lib", "/lib64", *bubblewrap.python_files())
        paths = [Path(os.path.abspath(word)), Path(word).resolve()]
        return all(any(path.is_relative_to(file) for file in (*system, *self._files)) for path in paths)


async def _relay_connections(channel: socket.socket, host: str, port: int) -> None:
    """Receive the sandbox's listening socket, and relay its connections to the endpoint until cancelled."""
    channel.setblocking(False)
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(channel)
    _, (number, *_), _, _ = socket.recv_fds(channel, 1, 1)
    waiting = socket.socket(fileno=number)
    waiting.setblocking(False)
    async with asyncio.TaskGroup() as connections:
        free = asyncio.Semaphore(CONNECTIONS)
        with waiting:
            while True:
                await free.acquire()
                connection, _ = await loop.sock_accept(waiting)
                connections.create_task(_relay(connection, host, port)).add_done_callback(lambda _: free.release())


async def _relay(inner: socket.socket, host: str, port: int) -> None:
    reader, writer = await asyncio.open_connection(sock=inner)
    try:
        with contextlib.suppress(OSError):
            endpoint_reader, endpoint = await asyncio.open_connection(host, port)
            try:
                await asyncio.gather(_copy(reader, endpoint), _copy(endpoint_reader, writer))
            finally:
                endpoint.close()
    finally:
        writer.close()


async def _copy(source: asyncio.StreamReader, drain: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK_BYTES):
        drain.write(data)
        await drain.drain()
    drain.write_eof()
