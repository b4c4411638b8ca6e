"""Buckets through Ray's object store, which keeps a copy on each node that fetched one, until its last reference ends.

To locate a bucket, Ray asks its owner, the rank. If that rank's node is cut off, Ray waits for a reply until TCP times
out, which takes minutes. So every fetch has a timeout, and a late bucket is `BucketGone`.
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
"""The first timeout of a bucket in seconds, and its increase after each late one."""


class ObjectStoreSender:
    """Implements `transport.Sender`."""

    def put(self, version: int, arrays: Sequence[Bytes]) -> list[BucketRef]:
        """See `transport.Sender.put`."""
        return [ray.put(array) for array in arrays]

    def drop(self, before: int) -> None:
        """See `transport.Sender.drop`; nothing to do: the object store counts references."""


class ObjectStoreReceiver:
    """Implements `transport.Receiver`."""

    def __init__(self) -> None:
        self._limit_s = FETCH_S

    async def fetch(self, ref: BucketRef) -> Bytes:
        """See `transport.Receiver.fetch`. Makes no copy if the node already has the bucket.

        Each late bucket increases the timeout by `LONGER_S`, until one arrives: the network may be slow.
        """
        limit_s = self._limit_s
        try:
            async with asyncio.timeout(limit_s):
                bucket = await cast("ObjectRef[Bytes]", ref)
        except ObjectLostError as error:
            raise BucketGone(f"the object store has lost a bucket: {error}") from error
        except TimeoutError:
            # From the timeout of this call: buckets fetched concurrently and late together increase it once.
            self._limit_s = limit_s + LONGER_S
            raise BucketGone(f"a bucket has not come within {limit_s:g} s") from None
        self._limit_s = FETCH_S
        return bucket
