"""Buckets through Ray's object store, which has one copy on every node that asks, until the last reference is gone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import ray
from ray.exceptions import ObjectLostError

from streamppo.weights.delta import Bytes
from streamppo.weights.transport import BucketRef, Lost

if TYPE_CHECKING:
    from ray import ObjectRef


class Outlet:
    """Implements `transport.Outlet`."""

    def put(self, version: int, arrays: Sequence[Bytes]) -> list[BucketRef]:
        """See `transport.Outlet.put`."""
        return [ray.put(array) for array in arrays]

    def drop(self, before: int) -> None:
        """See `transport.Outlet.drop`: the object store counts references."""


class Inlet:
    """Implements `transport.Inlet`."""

    async def fetch(self, ref: BucketRef) -> Bytes:
        """See `transport.Inlet.fetch`. Without a copy where the node has the bucket already."""
        try:
            return await cast("ObjectRef[Bytes]", ref)
        except ObjectLostError as error:
            raise Lost(f"the object store has lost a bucket: {error}") from error
