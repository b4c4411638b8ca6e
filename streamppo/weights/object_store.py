"""Transfers buckets through Ray's object store, with timeouts: Ray waits for minutes if the network fails."""

import asyncio
from collections.abc import Sequence
from typing import cast

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from streamppo.weights.delta import Bytes
from streamppo.weights.transport import BucketGone, BucketRef

FETCH_S, LONGER_S = 20.0, 10.0
"""The timeout of a fetch in seconds, and its increase after each fetch that exceeds it."""


class ObjectStoreSender:
    """Implements `transport.Sender`."""

    def put(self, version: int, arrays: Sequence[Bytes]) -> list[BucketRef]:
        return [ray.put(array) for array in arrays]

    def drop(self, before: int) -> None:
        """See `transport.Sender.drop`. Does nothing, because the object store counts references."""


class ObjectStoreReceiver:
    """Implements `transport.Receiver`."""

    def __init__(self) -> None:
        self._limit_s = FETCH_S

    async def fetch(self, ref: BucketRef) -> Bytes:
        """See `transport.Receiver.fetch`. Each timeout makes the next one `LONGER_S` longer, until a bucket arrives."""
        limit_s = self._limit_s
        try:
            async with asyncio.timeout(limit_s):
                bucket = await cast("ObjectRef[Bytes]", ref)
        except ObjectLostError as error:
            raise BucketGone(f"the object store has lost a bucket: {error}") from error
        except TimeoutError:
            # The sum starts from this call's timeout, so that concurrent fetches increase the timeout only once.
            self._limit_s = limit_s + LONGER_S
            raise BucketGone(f"a bucket did not arrive within {limit_s:g} s") from None
        self._limit_s = FETCH_S
        return bucket
