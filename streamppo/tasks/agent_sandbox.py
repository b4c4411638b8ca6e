"""Sandboxes for programs of agents: a protocol, and bubblewrap with a connection to the run's endpoint.

    the program -> 127.0.0.1:PORT, the sandbox's own -> its listening socket, handed out -> here -> the endpoint

The sandbox has a network of its own whose only interface is loopback. Before the program begins, it listens there at
the endpoint's port and hands the listening socket out of the sandbox; each connection to it is carried on to the
endpoint from here. The program has no other connection, and not the keys of other runs.
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
"""Connections of one program that are carried at once."""
PIECE = 2**16
ADDRESS_MIB = 2**22
"""Addresses of one process: Node and Java reserve far more than they touch."""
OTHERWISE = (
    "Where that cannot be, environment.sandbox = { kind = 'class', ... } names another place, or an agent without a "
    "sandbox runs as you."
)
ADD = "add it, or its folder, to environment.sandbox.files"
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
"""The script before the program in the sandbox; its exec keeps process, limits and filter."""


class AgentProgram(NamedTuple):
    """One run of a program: its words, the variables in which it finds its endpoint, and the time that it has.

    `address` is that of the endpoint without /v1, as it is reached from this machine.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str]
    address: str
    timeout_s: float


class AgentSandbox(Protocol):
    """Runs programs of agents; a remote service is another class with this method."""

    async def run(self, program: AgentProgram) -> Ran:
        """Run to the end, or to the time limit. Raises an exception only if the sandbox itself fails."""
        ...


def build(config: AnySandbox) -> AgentSandbox:
    """Make the sandbox that the configuration names. Raises `TaskError` if it cannot be made here."""
    match config:
        case BubblewrapSandbox():
            return Walled(config)
        case CustomSandbox(name=name, arguments=arguments):
            asked_by = f"environment.sandbox {name!r}"
            factory = plugins.function(name, "environment.sandbox")
            plugins.check_arguments(factory, arguments, asked_by)
            return cast(AgentSandbox, plugins.call(asked_by, partial(factory, **arguments)))


class Walled:
    """Bubblewrap for agents: as for programs of the policy, with readable files and a connection to the endpoint.

    Raises `TaskError` if it cannot be made here, or a file is missing.
    """

    def __init__(self, config: BubblewrapSandbox) -> None:
        if missing := bubblewrap.problem(OTHERWISE):
            raise TaskError(missing)
        self._config = config
        self._files = [os.path.abspath(file) for file in config.files]
        if absent := [file for file in self._files if not os.path.exists(file)]:
            raise TaskError(f"environment.sandbox.files has {absent[0]!r}, which is not a file or folder here")

    def look(self, words: tuple[str, ...]) -> None:
        """Raise `TaskError` for a command whose program or files the sandbox does not see."""
        program = shutil.which(self._placed(words[0]), path=PATH)
        if program is None:
            raise TaskError(f"environment.command begins with {words[0]!r}, not a program in its sandbox: {ADD}")
        for word in (program, *words[1:]):
            if os.path.isfile(word) and not self._sees(word):
                raise TaskError(f"environment.command names {word!r}, which its sandbox does not see: {ADD}")

    async def run(self, program: AgentProgram) -> Ran:
        """See `AgentSandbox.run`."""
        place = urlsplit(program.address)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert place.hostname is not None and place.port is not None
            carrying = asyncio.create_task(_carry(ours, place.hostname, place.port))
            try:
                return await asyncio.to_thread(self._run, program, theirs.fileno(), place.port)
            finally:
                carrying.cancel()
                await asyncio.gather(carrying, return_exceptions=True)

    def _run(self, program: AgentProgram, channel: int, port: int) -> Ran:
        # In the sandbox the endpoint is at loopback, wherever it listens.
        inside = f"http://127.0.0.1:{port}"
        variables = {name: value.replace(program.address, inside) for name, value in program.variables.items()}
        job = ([self._placed(word) for word in program.words], variables, port, channel)
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

    def _placed(self, word: str) -> str:
        """Make a file's name an absolute path: the program begins in its scratch folder."""
        path = os.path.abspath(word)
        within = any(Path(path).is_relative_to(file) for file in self._files)
        return path if within and os.path.exists(path) else word

    def _sees(self, word: str) -> bool:
        system = ("/usr", "/bin", "/sbin", "/lib", "/lib64", *bubblewrap.python_files())
        paths = [Path(os.path.abspath(word)), Path(word).resolve()]
        return all(any(path.is_relative_to(file) for file in (*system, *self._files)) for path in paths)


async def _carry(channel: socket.socket, host: str, port: int) -> None:
    """Wait for the sandbox's listening socket, and carry each connection to it on to the endpoint, until cancelled."""
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
                connections.create_task(_connect(connection, host, port)).add_done_callback(lambda _: free.release())


async def _connect(theirs: socket.socket, host: str, port: int) -> None:
    """Carry one connection both ways until both are closed, or one is lost."""
    reader, writer = await asyncio.open_connection(sock=theirs)
    try:
        with contextlib.suppress(OSError):
            there, endpoint = await asyncio.open_connection(host, port)
            try:
                await asyncio.gather(_pump(reader, endpoint), _pump(there, writer))
            finally:
                endpoint.close()
    finally:
        writer.close()


async def _pump(source: asyncio.StreamReader, drain: asyncio.StreamWriter) -> None:
    while data := await source.read(PIECE):
        drain.write(data)
        await drain.drain()
    drain.write_eof()
