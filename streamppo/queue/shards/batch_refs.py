"""References by which the ranks get batches from the queue, through Ray's object store.

A batch is encoded in a thread and put into the store one time for all ranks; the ranks of a node read the same bytes.
With several ranks, each requests the tokens of its own rows (batch_parts.py).
"""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray

from streamppo.queue.store import batch_parts
from streamppo.types import Batch, Outline, Tokens, WireStruct, encode, ints

Wanted: TypeAlias = 'Literal["whole", "outline"] | bytes'
"""What of a batch is wanted: all of it, its `Outline`, or the `Tokens` of its trajectories at these rows (int32)."""
BatchRef: TypeAlias = ray.ObjectRef[NDArray[np.uint8]]
"""An encoded `Batch`, or a part of it, in the object store."""
Put: TypeAlias = Callable[[NDArray[np.uint8]], BatchRef]
KEPT = 2
"""The number of batches that are kept: one rank may request the next batch while another fetches this one."""


def put(encoded: NDArray[np.uint8]) -> BatchRef:
    """Put an encoded batch into the object store, as an array, because readers do not copy an array."""
    return ray.put(encoded)


def encode_slowly(value: Batch | Outline | tuple[Tokens, ...]) -> NDArray[np.uint8]:
    """Return `encode(value)`. Trajectories are encoded one by one, so that the event loop can run in between."""
    encoded = bytearray()
    match value:
        case Batch():
            _add_batch(encoded, value)
        case Outline():
            encoded += b"\x82" + encode("batch")
            _add_batch(encoded, value.batch)
            encoded += encode("prompt_lengths") + encode(value.prompt_lengths)
        case tokens:
            encoded += _head(len(tokens))
            _add(encoded, tokens)
    return np.frombuffer(encoded, dtype=np.uint8)


def _add_batch(encoded: bytearray, batch: Batch) -> None:
    # The last field, trajectories, is empty and takes one byte, which the array's header replaces.
    encoded += encode(msgspec.structs.replace(batch, trajectories=()))[:-1] + _head(len(batch.trajectories))
    _add(encoded, batch.trajectories)


def _add(encoded: bytearray, members: Sequence[WireStruct]) -> None:
    encoder = msgspec.msgpack.Encoder()
    for member in members:
        encoder.encode_into(member, encoded, -1)


def _head(count: int) -> bytes:
    """The msgpack header of an array of `count` entries: encode `count` Nones, and cut off their bytes."""
    return encode((None,) * count)[: -count or None]


class BatchRefs:
    """Keeps the references of the last requested batches, outlines and tokens. `read` is called once, in a thread."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._batches, self._refs = _TaskCache[Batch](), _TaskCache[BatchRef]()

    async def ref(self, version: int, wanted: Wanted, read: Callable[[], Batch]) -> BatchRef:
        if wanted == "whole":
            return await self._refs.get(version, wanted, lambda: self._put(encode_slowly(read())))
        batch = await self._batches.get(version, "", read)
        return await self._refs.get(version, wanted, lambda: self._put(encode_slowly(_select(batch, wanted))))


def _select(batch: Batch, wanted: Wanted) -> Outline | tuple[Tokens, ...]:
    if isinstance(wanted, bytes):
        return batch_parts.select_tokens(batch, ints(wanted).tolist())
    return batch_parts.make_outline(batch)


Result = TypeVar("Result")


class _TaskCache(Generic[Result]):
    """A cache of results, each computed one time, in a thread, for all callers; it keeps the last `KEPT` versions."""

    def __init__(self) -> None:
        self._tasks: dict[int, dict[str | bytes, asyncio.Task[Result]]] = {}

    async def get(self, version: int, name: str | bytes, make: Callable[[], Result]) -> Result:
        """Return the result of `make` for `version` and `name`. Raises its error; the next call then tries again."""
        tasks = self._tasks.setdefault(version, {})
        if name not in tasks:
            tasks[name] = asyncio.create_task(asyncio.to_thread(make))
        task = tasks[name]
        for old in list(self._tasks)[:-KEPT]:
            del self._tasks[old]
        await asyncio.wait([task])
        if task.exception() is not None:
            tasks.pop(name, None)
        return task.result()
