"""Buckets through Ray's object store, which has one copy on every node that asks, until the last reference is gone.

Ray asks the rank that owns a bucket where it is. If that rank's node was cut off and is given up, Ray still waits for
an answer until TCP gives up, which takes minutes: so nobody waits for long, and a bucket that is late is `Lost`.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import ray
from ray.exceptions import ObjectLostError

from streamppo.weights.delta import Bytes
from streamppo.weights.transport import BucketGone, BucketRef

if TYPE_CHECKING:
    from ray import ObjectRef


FETCH_S, LONGER_S = 20.0, 10.0
"""Seconds for a bucket, at first, and how much more after one that was late."""


class ObjectStoreSender:
    """Implements `transport.Sender`."""

    def put(self, version: int, arrays: Sequence[Bytes]) -> list[BucketRef]:
        """See `transport.Sender.put`."""
        return [ray.put(array) for array in arrays]

    def drop(self, before: int) -> None:
        """See `transport.Sender.drop`: the object store counts references."""


class ObjectStoreReceiver:
    """Implements `transport.Receiver`."""

    def __init__(self) -> None:
        self._limit_s = FETCH_S

    async def fetch(self, ref: BucketRef) -> Bytes:
        """See `transport.Receiver.fetch`. Without a copy where the node has the bucket already.

        After each bucket that is late the next may take `LONGER_S` longer, until one comes: the network may be slow.
        """
        limit_s = self._limit_s
        try:
            async with asyncio.timeout(limit_s):
                found = await cast("ObjectRef[Bytes]", ref)
        except ObjectLostError as error:
            raise BucketGone(f"the object store has lost a bucket: {error}") from error
        except TimeoutError:
            # Buckets that were asked for together are late together.
            self._limit_s = limit_s + LONGER_S
            raise BucketGone(f"a bucket has not come within {limit_s:g} s") from None
        self._limit_s = FETCH_S
        return found
