"""Sources of a learner's batches: the protocol, and the archive in the place of the queue.

The live queue (`QueueActor`) and a run's archive (`ArchiveSource`) are both a `BatchSource`; neither knows which of the
two the learner has.
"""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import ray
from ray.actor import ActorProxy

from streamppo.queue.shards import batch_refs
from streamppo.queue.shards.batch_refs import BatchRef, Handout, Put
from streamppo.queue.store import archive
from streamppo.types import Push, decode, encode
from streamppo.weights.ledger import PublishReply
from streamppo.weights.shares import EncodedRecord, RankShare, ShareCollector

if TYPE_CHECKING:
    from streamppo.weights.transport import BucketRef


BEAT_S = 5.0
"""Seconds between two signs of life of a rollout actor or a rank, however long its work takes."""


class BatchSource(Protocol):
    """The calls that a learner makes: batches in, versions out. A Ray actor answers them."""

    @ray.method
    async def take(self, version: int) -> "list[BatchRef] | None":
        """Return the batch of the update that starts at `version`, in parts, as soon as it is whole; None after a stop.

        References are lost with the process that made them: then the next one has the same batch.
        """
        ...

    @ray.method
    async def outline(self, version: int) -> "list[BatchRef] | None":
        """Return the `Outline` of the same batch, in the same way, for a rank that reads some of its rows."""
        ...

    @ray.method
    async def tokens(self, version: int, rows: bytes) -> "list[BatchRef] | None":
        """Return the `Tokens` of the trajectories at `rows` (int32) of the same batch."""
        ...

    @ray.method
    async def publish(self, push: bytes, refs: "list[BucketRef]", learned: EncodedRecord, learner: int) -> bytes:
        """Receive one rank's share of a new version: its `Push`, its buckets, and the `TokenRecord` of its batch.

        `learner` counts the groups of ranks that the run has had. Returns a `PublishReply` when all shares have come.
        """
        ...

    @ray.method
    async def another_life(self, known: str) -> str:
        """Return the name of this process, as soon as it is not `known`."""
        ...

    @ray.method
    async def beat(self, actor: str) -> int:
        """Note that `actor` lives. Returns the number of actors that sample."""
        ...

    @ray.method
    async def archived_versions(self, run: str) -> list[int]:
        """Return the versions whose batches the run in the folder `run` has archived."""
        ...

    @ray.method
    async def archived_batch(self, run: str, version: int) -> bytes:
        """Return one of these, a `Batch`."""
        ...


Source = TypeVar("Source", bound=BatchSource)


def as_source(actor: ActorProxy[Source]) -> ActorProxy[BatchSource]:
    """The handle of a live queue or an archive, as the learner sees it."""
    # Ray's proxies do not say that a handle of a more special actor may stand for a handle of a more general one.
    return cast("ActorProxy[BatchSource]", actor)


class ArchivedRuns:
    """Batches of any run by its folder: the same for every source. Raises `JournalError` for a damaged run."""

    @ray.method
    async def archived_versions(self, run: str) -> list[int]:
        """The versions whose batches the run in the folder `run` has archived."""
        return (await asyncio.to_thread(_open_archive, run)).versions()

    @ray.method
    async def archived_batch(self, run: str, version: int) -> bytes:
        """The `Batch` from which the run went on at `version`."""
        return await asyncio.to_thread(lambda: encode(_open_archive(run).batch(version)))


class ArchiveSource(ArchivedRuns):
    """The batches of one run in their order, for a learner that makes its versions again; it keeps their digests."""

    def __init__(self, run: str, put: Put = batch_refs.put) -> None:
        self._archive = archive.open(Path(run))
        self._handout = Handout(put)
        self._digests: dict[int, str] = {}
        self._joining = ShareCollector(self._publish)

    @ray.method
    async def take(self, version: int) -> "list[BatchRef] | None":
        """The batch that was trained on from `version`."""
        return [await self._handout.batch(version, lambda: self._archive.batch(version))]

    @ray.method
    async def outline(self, version: int) -> "list[BatchRef] | None":
        """The outline of the batch that was trained on from `version`."""
        return [await self._handout.outline(version, lambda: self._archive.batch(version))]

    @ray.method
    async def tokens(self, version: int, rows: bytes) -> "list[BatchRef] | None":
        """The token ids of some of its rows."""
        return [await self._handout.tokens(version, rows, lambda: self._archive.batch(version))]

    @ray.method
    async def publish(self, push: bytes, refs: "list[BucketRef]", learned: EncodedRecord, learner: int) -> bytes:
        """Keep the digest of a version; its weights go nowhere. Returns a `PublishReply`."""
        return encode(await self._joining.result(RankShare(decode(push, Push), refs, learned)))

    async def _publish(self, whole: "RankShare[BucketRef]") -> PublishReply:
        digest = self._digests[whole.push.version] = whole.push.digest
        return PublishReply(digest=digest, whole=whole.push.version, wants_whole=True)

    @ray.method
    async def another_life(self, known: str) -> str:
        """Name the only process there is, and never another one."""
        if known:
            await asyncio.Event().wait()
        return "only"

    @ray.method
    async def beat(self, actor: str) -> int:
        """Note nothing: nobody asks, and nobody samples."""
        return 0

    @ray.method
    async def digests(self) -> dict[int, str]:
        """The digest of every version that was made."""
        return self._digests


@lru_cache(maxsize=1)
def _open_archive(run: str) -> archive.Archive:
    """The archive of `run`, opened once: its whole journal is checked, and all ranks must see the same batches."""
    return archive.open(Path(run))
