"""Transport of buckets from a rank to rollout actors: a sender, a receiver, and a reference of each bucket.

    rank     sender.put(version, buckets) -> references ----> ledger ----> receiver.fetch(reference)     rollout actor

Ranks put buckets and continue; actors fetch them when they are ready. Neither end waits for the other: if a bucket's
rank has died or has replaced the bucket, the fetch raises `BucketGone`, and the actor pulls from the ledger again. The
transport is not trusted: bytes are verified where they arrive.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from streamppo.weights.delta import Bytes

if TYPE_CHECKING:
    from ray import ObjectRef

BucketRef: TypeAlias = "ObjectRef[Bytes] | bytes"
"""A reference of a bucket at its rank; only the two ends of one transport interpret it."""


class BucketGone(Exception):
    """A bucket no longer exists: its rank has died, or has replaced it by a newer one."""


class Sender(Protocol):
    """A rank's end."""

    def put(self, version: int, arrays: Sequence[Bytes]) -> list[BucketRef]:
        """Keep a copy of the buckets of `version` for actors to fetch. Raises `WeightsError` if there is no room."""
        ...

    def drop(self, before: int) -> None:
        """Drop versions below `before` for new fetches; fetches that have begun may finish."""
        ...


class Receiver(Protocol):
    """A rollout actor's end."""

    async def fetch(self, ref: BucketRef) -> Bytes:
        """Return the bytes of a bucket; callers must not change them. Raises `BucketGone`."""
        ...
