"""The way of buckets from a rank to rollout actors: two ends, and a reference of each bucket between them.

    rank     outlet.put(version, buckets) -> references ----> ledger ----> inlet.fetch(reference)     rollout actor

Ranks put and go on, actors fetch when they are ready. No end waits for the other one: a bucket whose rank has died, or
has newer ones, is `Lost`, and the actor asks the ledger again. Nothing is trusted on the way: bytes are compared where
they end up.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from streamppo.weights.delta import Bytes

if TYPE_CHECKING:
    from ray import ObjectRef

BucketRef: TypeAlias = "ObjectRef[Bytes] | bytes"
"""A bucket at its rank: opaque to all but the two ends of one transport."""


class BucketGone(Exception):
    """A bucket is not there any more: its rank has died, or has newer ones."""


class Sender(Protocol):
    """A rank's end."""

    def put(self, version: int, arrays: Sequence[Bytes]) -> list[BucketRef]:
        """Keep a copy of the buckets of `version` where actors get them. Raises `WeightsError` if there is no room."""
        ...

    def drop(self, before: int) -> None:
        """Keep no versions below `before` for those that begin to fetch; those that have begun may still end."""
        ...


class Receiver(Protocol):
    """A rollout actor's end."""

    async def fetch(self, ref: BucketRef) -> Bytes:
        """Return the bytes of a bucket, which nobody changes. Raises `Lost`."""
        ...
