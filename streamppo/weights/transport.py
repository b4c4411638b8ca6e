"""Transports buckets from a rank to rollout actors: a sender, a receiver, and a reference for each bucket.

    rank     sender.put(version, buckets) -> references ----> ledger ----> receiver.fetch(reference)     rollout actor

Neither end waits for the other: if a bucket's rank has died or has replaced the bucket, the fetch raises `BucketGone`,
and the actor pulls from the ledger again. Rollout actors verify the bytes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from streamppo.weights.delta import Bytes

if TYPE_CHECKING:
    from ray import ObjectRef

BucketRef: TypeAlias = "ObjectRef[Bytes] | bytes"
"""A reference of a bucket at its rank. Only the sender and receiver of the same transport interpret it."""


class BucketGone(Exception):
    """A bucket no longer exists, because its rank has died or has replaced it by a newer one."""


class Sender(Protocol):
    """A rank's end of the transport."""

    def put(self, version: int, arrays: Sequence[Bytes]) -> list[BucketRef]:
        """Store a copy of the buckets of `version` for actors to fetch. Raises `WeightsError` if there is no room."""
        ...

    def drop(self, before: int) -> None:
        """Refuse new fetches of versions below `before`. Fetches that have begun may finish."""
        ...


class Receiver(Protocol):
    """A rollout actor's end of the transport."""

    async def fetch(self, ref: BucketRef) -> Bytes:
        """Return the bytes of a bucket, which callers must not change. Raises `BucketGone`."""
        ...
