"""Batches on their way from the queue to the ranks, by the object store.

A batch is encoded once, in a thread, and put into the store once, however many ranks ask for it: the queue's event loop
sends references. A node gets the bytes once, and its ranks read them where they lie. Several ranks ask for its outline,
which is put once, and each for the tokens of the rows that it reads (parts.py).
"""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray

from streamppo.queue.store import batch_parts
from streamppo.types import Batch, Outline, Tokens, WireStruct, encode, ints

BatchRef: TypeAlias = ray.ObjectRef[NDArray[np.uint8]]
"""An encoded `Batch`, or a part of it, in the object store."""
Put: TypeAlias = Callable[[NDArray[np.uint8]], BatchRef]
"""Puts an encoded batch into the object store."""
KEPT = 2
"""Batches that are kept: a rank may ask for the next one while another fetches this one."""


def put(encoded: NDArray[np.uint8]) -> BatchRef:
    """Put an encoded batch into the object store; readers do not copy an array."""
    return ray.put(encoded)


def encode_slowly(value: Batch | Outline | tuple[Tokens, ...]) -> NDArray[np.uint8]:
    """`encode(value)`, one trajectory after another: the event loop beside this thread waits for one at most."""
    whole = bytearray()
    match value:
        case Batch():
            _add_batch(whole, value)
        case Outline():
            whole += b"\x82" + encode("batch")
            _add_batch(whole, value.batch)
            whole += encode("prompt_lengths") + encode(value.prompt_lengths)
        case tokens:
            whole += _head(len(tokens))
            _add(whole, tokens)
    return np.frombuffer(whole, dtype=np.uint8)


def _add_batch(whole: bytearray, batch: Batch) -> None:
    # An empty array is one byte.
    whole += encode(msgspec.structs.replace(batch, trajectories=()))[:-1] + _head(len(batch.trajectories))
    _add(whole, batch.trajectories)


def _add(whole: bytearray, members: Sequence[WireStruct]) -> None:
    encoder = msgspec.msgpack.Encoder()
    for one in members:
        encoder.encode_into(one, whole, -1)


def _head(count: int) -> bytes:
    """The head of an array of `count`: what is left without its members, of which each None is one byte."""
    return encode((None,) * count)[: -count or None]


class Handout:
    """The batches that ranks asked for last, whole or in parts, each of them put away once by `put`.

    Everywhere `read` returns the batch of `version`; it is called in a thread, once. Its error is raised.
    """

    def __init__(self, put: Put) -> None:
        self._put = put
        self._batches, self._refs = _Once[Batch](), _Once[BatchRef]()

    async def batch(self, version: int, read: Callable[[], Batch]) -> BatchRef:
        """The batch as it is."""
        return await self._refs.get(version, "whole", lambda: self._put(encode_slowly(read())))

    async def outline(self, version: int, read: Callable[[], Batch]) -> BatchRef:
        """Its `Outline`."""
        batch = await self._batches.get(version, "", read)
        return await self._refs.get(version, "outline", lambda: self._put(encode_slowly(batch_parts.outline_of(batch))))

    async def tokens(self, version: int, rows: bytes, read: Callable[[], Batch]) -> BatchRef:
        """The `Tokens` of the trajectories at `rows` (int32)."""
        batch, picked = await self._batches.get(version, "", read), ints(rows).tolist()
        return await self._refs.get(
            version, rows, lambda: self._put(encode_slowly(batch_parts.tokens_of(batch, picked)))
        )


Made = TypeVar("Made")


class _Once(Generic[Made]):
    """Things that a thread makes, each once, however many wait for it; those of the newest `KEPT` versions are kept."""

    def __init__(self) -> None:
        self._made: dict[int, dict[str | bytes, asyncio.Task[Made]]] = {}

    async def get(self, version: int, name: str | bytes, make: Callable[[], Made]) -> Made:
        """Return what `make` returned for `version` and `name`. Raises its error, and the next call makes it again."""
        of_version = self._made.setdefault(version, {})
        if name not in of_version:
            of_version[name] = asyncio.create_task(asyncio.to_thread(make))
        made = of_version[name]
        for old in list(self._made)[:-KEPT]:
            del self._made[old]
        await asyncio.wait([made])
        if made.exception() is not None:
            of_version.pop(name, None)
        return made.result()
