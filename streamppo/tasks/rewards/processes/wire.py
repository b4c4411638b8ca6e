"""Messages between the actor and its reward processes: frames of msgpack, each after its length."""

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
"""Raised for columns that do not cross: an object, a list in a list in a list, ..."""
T = TypeVar("T")


class LoadReward(WireStruct, frozen=True):
    """actor -> template: load this reward."""

    function: str
    arguments: dict[str, Argument]
    memory_mib: int


class Ready(WireStruct, frozen=True):
    """template -> actor: it is loaded, or else the error."""

    error: str = ""


class Order(WireStruct, frozen=True):
    """actor -> template: fork onto the socket and page that come with this; or kill `pid`, and then `collect` it."""

    pid: int = 0
    collect: bool = False


class ProcessStarted(WireStruct, frozen=True):
    """template -> actor: the new process, or the exit status of the old one (a negative one is a signal)."""

    pid: int
    status: int = 0


class Call(WireStruct, frozen=True):
    """actor -> process: score these."""

    number: int
    texts: Texts
    columns: Columns
    timeout_s: float
    """Of its time, so much is left."""
    limit_s: float
    """Its time in all processes that it runs in."""


class ScoringAnswer(WireStruct, frozen=True):
    """process -> actor: one outcome for each text."""

    number: int
    outcomes: tuple[Outcome, ...]


def frame(value: WireStruct) -> bytes:
    """Encode `value` after its length. Raises one of `UNSENDABLE` for columns that msgpack does not hold."""
    body = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(body)) + body


def send(channel: socket.socket, value: WireStruct) -> None:
    """Write one frame."""
    channel.sendall(frame(value))


def receive(channel: socket.socket, kind: type[T]) -> T:
    """Read one frame. Raises `EOFError` when the other side is gone."""
    (length,) = LENGTH.unpack(_read_exactly(channel, LENGTH.size))
    return msgspec.msgpack.decode(_read_exactly(channel, length), type=kind, ext_hook=columns.unpack)


def receive_order(channel: socket.socket) -> tuple[Order, list[int]]:
    """Read an order, and the file descriptors that come with its first byte. Raises `EOFError`."""
    header, fds, _, _ = socket.recv_fds(channel, LENGTH.size, 2)
    if len(header) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(header)
    return msgspec.msgpack.decode(_read_exactly(channel, length), type=Order), fds


def _read_exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


class Outbox:
    """Frames of one turn of the event loop, written together at its end: a write costs as much as the rest of a call.

    An answer that is not written yet when another call holds or ends its process is lost: it fares as one that runs.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._frames: list[bytes] = []

    def put(self, message: bytes) -> None:
        """Write a frame at the end of this turn."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._write)
        self._frames.append(message)

    def _write(self) -> None:
        frames, self._frames = self._frames, []
        self._writer.write(b"".join(frames))


async def receive_async(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Read one frame. Raises `asyncio.IncompleteReadError` when the other side is gone."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await reader.readexactly(length), type=kind, ext_hook=columns.unpack)
