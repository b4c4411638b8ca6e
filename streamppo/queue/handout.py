"""Batches on their way from the queue to the ranks, by the object store.

A batch is encoded once, in a thread, and put into the store once, however many ranks ask for it: the queue's event loop
sends references. A node gets the bytes once, and its ranks read them where they lie.
"""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from streamppo.types import Batch, encode

BatchRef: TypeAlias = ray.ObjectRef[NDArray[np.uint8]]
"""An encoded `Batch` in the object store."""
KEPT = 2
"""Batches that are kept: a rank may ask for the next one while another fetches this one."""


def put(encoded: bytes) -> BatchRef:
    """Put an encoded batch into the object store; as an array, which readers do not copy."""
    return ray.put(np.frombuffer(encoded, dtype=np.uint8))


class Handout:
    """The batches that ranks asked for last, each put away once by `put`."""

    def __init__(self, put: Callable[[bytes], BatchRef]) -> None:
        self._put = put
        self._made: dict[int, asyncio.Task[BatchRef]] = {}

    async def batch(self, version: int, read: Callable[[], Batch]) -> BatchRef:
        """The batch of `version`, which `read` returns; it is called in a thread, once. Raises its error."""
        if version not in self._made:
            self._made[version] = asyncio.create_task(asyncio.to_thread(lambda: self._put(encode(read()))))
        made = self._made[version]
        for old in list(self._made)[:-KEPT]:
            del self._made[old]
        try:
            return await asyncio.shield(made)
        except Exception:
            self._made.pop(version, None)
            raise
