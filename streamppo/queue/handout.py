"""Batches on their way from the queue to the ranks, by the object store.

A batch is encoded once, in a thread, and put into the store once, however many ranks ask for it: the queue's event loop
sends references. A node gets the bytes once, and its ranks read them where they lie.
"""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray

from streamppo.types import Batch, encode

BatchRef: TypeAlias = ray.ObjectRef[NDArray[np.uint8]]
"""An encoded `Batch` in the object store."""
Put: TypeAlias = Callable[[NDArray[np.uint8]], BatchRef]
"""Puts an encoded batch into the object store."""
KEPT = 2
"""Batches that are kept: a rank may ask for the next one while another fetches this one."""


def put(encoded: NDArray[np.uint8]) -> BatchRef:
    """Put an encoded batch into the object store; readers do not copy an array."""
    return ray.put(encoded)


def encoded(batch: Batch) -> NDArray[np.uint8]:
    """`encode(batch)`, one trajectory after another: the event loop beside this thread waits for one at most."""
    count = len(batch.trajectories)
    # An empty array is one byte, and so is each None: what is left is the head of an array of `count`.
    head = encode(msgspec.structs.replace(batch, trajectories=()))[:-1] + encode((None,) * count)[: -count or None]
    pieces = [head, *map(encode, batch.trajectories)]
    joined, at = np.empty(sum(map(len, pieces)), dtype=np.uint8), 0
    for piece in pieces:
        joined[at : at + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        at += len(piece)
    return joined


class Handout:
    """The batches that ranks asked for last, each put away once by `put`."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._made: dict[int, asyncio.Task[BatchRef]] = {}

    async def batch(self, version: int, read: Callable[[], Batch]) -> BatchRef:
        """The batch of `version`, which `read` returns; it is called in a thread, once. Raises its error."""
        if version not in self._made:
            self._made[version] = asyncio.create_task(asyncio.to_thread(lambda: self._put(encoded(read()))))
        made = self._made[version]
        for old in list(self._made)[:-KEPT]:
            del self._made[old]
        await asyncio.wait([made])
        if made.exception() is not None:
            self._made.pop(version, None)
        return made.result()
