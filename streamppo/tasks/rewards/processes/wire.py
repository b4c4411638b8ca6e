"""Messages between the actor and its reward processes: msgpack frames with a length prefix."""

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec

from streamppo.config.reward import Argument
from streamppo.tasks import columns
from streamppo.tasks.rewards.outcome import Outcome
from streamppo.tasks.rewards.signature import Columns, Texts
from streamppo.types import WireStruct

LENGTH = struct.Struct("<I")
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors of columns that cannot be sent: an object, lists that are nested too deeply, ..."""
T = TypeVar("T")


class LoadReward(WireStruct, frozen=True):
    """actor -> template: load this reward."""

    function: str
    arguments: dict[str, Argument]
    memory_mib: int


class Ready(WireStruct, frozen=True):
    """template -> actor: the reward is loaded, or the error of its import."""

    error: str = ""


class Order(WireStruct, frozen=True):
    """actor -> template: fork with the attached socket and page; or kill `pid`, and with `collect` wait for its end."""

    pid: int = 0
    collect: bool = False


class ProcessStarted(WireStruct, frozen=True):
    """template -> actor: the new process, or the exit status of an ended one (negative: a signal)."""

    pid: int
    status: int = 0


class Call(WireStruct, frozen=True):
    """actor -> process: score these texts."""

    number: int
    texts: Texts
    columns: Columns
    timeout_s: float
    """The call's remaining time."""
    limit_s: float
    """The call's time limit over all processes in which it runs."""


class ScoringAnswer(WireStruct, frozen=True):
    """process -> actor: one outcome for each text."""

    number: int
    outcomes: tuple[Outcome, ...]


def frame(value: WireStruct) -> bytes:
    """Encode `value` with a length prefix. Raises one of `UNSENDABLE` for columns that msgpack cannot encode."""
    body = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(body)) + body


def send(channel: socket.socket, value: WireStruct) -> None:
    """Write one frame."""
    channel.sendall(frame(value))


def receive(channel: socket.socket, kind: type[T]) -> T:
    """Read one frame. Raises `EOFError` if the other side has closed the channel."""
    (length,) = LENGTH.unpack(read_exactly(channel, LENGTH.size))
    return msgspec.msgpack.decode(read_exactly(channel, length), type=kind, ext_hook=columns.unpack)


def receive_order(channel: socket.socket) -> tuple[Order, list[int]]:
    """Read an order, and the file descriptors attached to its first byte. Raises `EOFError`."""
    header, fds, _, _ = socket.recv_fds(channel, LENGTH.size, 2)
    if len(header) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(header)
    return msgspec.msgpack.decode(read_exactly(channel, length), type=Order), fds


def read_exactly(channel: socket.socket, count: int) -> bytes:
    """Read `count` bytes. Raises `EOFError` if the other side has closed the channel."""
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


class Outbox:
    """Writes all frames of one turn of the event loop together: a write costs as much as the rest of a call."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._frames: list[bytes] = []

    def put(self, message: bytes) -> None:
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._write)
        self._frames.append(message)

    def _write(self) -> None:
        frames, self._frames = self._frames, []
        self._writer.write(b"".join(frames))


async def receive_async(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Read one frame. Raises `asyncio.IncompleteReadError` if the other side has closed the channel."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await reader.readexactly(length), type=kind, ext_hook=columns.unpack)
