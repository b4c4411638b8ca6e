"""Sources of a learner's batches: the protocol, and the archive as a source."""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar, cast

import ray
from ray.actor import ActorProxy

from streamppo.queue.shards import batch_refs
from streamppo.queue.shards.batch_refs import BatchRef, BatchRefs, Put, Wanted
from streamppo.queue.store import archive
from streamppo.types import Push, decode, encode
from streamppo.weights.ledger import PublishReply
from streamppo.weights.shares import EncodedRecord, RankShare, ShareCollector
from streamppo.weights.transport import BucketRef

BEAT_S = 5.0
"""Seconds between two heartbeats of a rollout actor or a rank, also during long work."""


class BatchSource(Protocol):
    """The methods by which a learner gets batches from a Ray actor and gives it new versions."""

    @ray.method
    async def take(self, version: int, wanted: Wanted) -> "list[BatchRef] | None":
        """Wait for the batch of the update from `version`; all ranks get the same parts; None after a stop."""
        ...

    @ray.method
    async def publish(self, push: bytes, refs: "list[BucketRef]", record: EncodedRecord, learner: int) -> bytes:
        """Receive one rank's share of a version; return a `PublishReply` once all ranks of group `learner` called."""
        ...

    @ray.method
    async def new_process_id(self, known: str) -> str:
        """Wait until the id of this process differs from `known`, and return it."""
        ...

    @ray.method
    async def beat(self, actor: str) -> int:
        """Record a heartbeat of `actor`; return the number of actors that sample."""
        ...

    @ray.method
    async def archived_versions(self, run: str) -> list[int]: ...

    @ray.method
    async def archived_batch(self, run: str, version: int) -> bytes: ...


Source = TypeVar("Source")


def as_source(actor: ActorProxy[Source]) -> ActorProxy[BatchSource]:
    """Give the handle of a live queue or an archive the type of the protocol."""
    # Ray's proxies are not covariant, and a default value in an actor makes another type of its method.
    return cast("ActorProxy[BatchSource]", actor)


class ArchivedRuns:
    """Access to the archived batches of any run, by its folder. Raises `JournalError` for a damaged run."""

    @ray.method
    async def archived_versions(self, run: str) -> list[int]:
        return (await asyncio.to_thread(_open_archive, run)).versions()

    @ray.method
    async def archived_batch(self, run: str, version: int) -> bytes:
        return await asyncio.to_thread(lambda: encode(_open_archive(run).batch(version)))


class ArchiveSource(ArchivedRuns):
    """Gives a run's archived batches to a learner that replays the run, and keeps the digests of its new versions."""

    def __init__(self, run: str, put: Put = batch_refs.put) -> None:
        self._archive = archive.open(Path(run))
        self._refs = BatchRefs(put)
        self._digests: dict[int, str] = {}
        self._shares = ShareCollector(self._publish)

    @ray.method
    async def take(self, version: int, wanted: Wanted = "whole") -> "list[BatchRef] | None":
        return [await self._refs.ref(version, wanted, lambda: self._archive.batch(version))]

    @ray.method
    async def publish(self, push: bytes, refs: "list[BucketRef]", record: EncodedRecord, learner: int) -> bytes:
        """Keep the digest of a version, discard its weights, and return a `PublishReply`."""
        return encode(await self._shares.result(RankShare(decode(push, Push), refs, record)))

    async def _publish(self, share: "RankShare[BucketRef]") -> PublishReply:
        digest = self._digests[share.push.version] = share.push.digest
        return PublishReply(digest=digest, whole=share.push.version, wants_whole=True)

    @ray.method
    async def new_process_id(self, known: str) -> str:
        """Return the constant id of this process; a caller that knows the id waits forever."""
        if known:
            await asyncio.Event().wait()
        return "only"

    @ray.method
    async def beat(self, actor: str) -> int:
        return 0

    @ray.method
    async def digests(self) -> dict[int, str]:
        return self._digests


@lru_cache(maxsize=1)
def _open_archive(run: str) -> archive.Archive:
    """Open the archive of `run` once: opening checks the whole journal, and all ranks must see the same batches."""
    return archive.open(Path(run))
