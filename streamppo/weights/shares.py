"""Joins the shares of a version from all ranks of a learner."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import structs

from streamppo.errors import WeightsError
from streamppo.types import Push, Tensor, TensorChunk

if TYPE_CHECKING:
    from ray import ObjectRef

EncodedRecord: TypeAlias = "bytes | list[ObjectRef[bytes]]"
"""An encoded `TokenRecord`; b"" without a batch. A queue with shards gets a list with at most one reference to it."""
T = TypeVar("T")
R = TypeVar("R")
REMEMBERED = 64
"""The number of versions whose results are kept for ranks that repeat a call."""


class RankShare(NamedTuple, Generic[T]):
    """One rank's share of a version with the references of its buckets. Only rank 0's `record` is used."""

    push: Push
    refs: list[T]
    record: EncodedRecord


class ShareCollector(Generic[T, R]):
    """Calls `publish` once when all ranks have added a version's shares; with other weights the version restarts."""

    def __init__(self, publish: Callable[[RankShare[T]], Awaitable[R]]) -> None:
        self._publish = publish
        self._waiting: dict[int, dict[int, RankShare[T]]] = {}
        self._tasks: dict[int, asyncio.Future[asyncio.Task[R]]] = {}
        self._digests: dict[int, dict[int, str]] = {}

    async def result(self, share: RankShare[T]) -> R:
        """Add a share, and wait for the result of its version. Raises the errors of `publish` and of `join`."""
        version, rank, digest = share.push.version, share.push.rank, share.push.digest
        if self._digests.setdefault(version, {}).setdefault(rank, digest) != digest:
            self._tasks.pop(version, None)
            self._digests[version] = {rank: digest}
        if version not in self._tasks:
            self._tasks[version] = asyncio.get_running_loop().create_future()
            self._tasks.pop(version - REMEMBERED, None)
            self._digests.pop(version - REMEMBERED, None)
        task_future = self._tasks[version]
        if not task_future.done():
            shares = self._waiting.setdefault(version, {})
            shares[rank] = share
            if len(shares) == share.push.ranks:
                del self._waiting[version]
                task_future.set_result(asyncio.create_task(self._make([shares[rank] for rank in sorted(shares)])))
        task = await asyncio.shield(task_future)
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and task.exception() is not None and self._tasks.get(version) is task_future:
                del self._tasks[version]

    async def _make(self, shares: Sequence[RankShare[T]]) -> R:
        refs = [ref for share in shares for ref in share.refs]
        return await self._publish(RankShare(join([share.push for share in shares]), refs, shares[0].record))


def join(parts: Sequence[Push]) -> Push:
    """Join the shares of all ranks to the push of a version. Raises `WeightsError` if they do not fit together."""
    first = parts[0]
    if [part.rank for part in parts] != list(range(first.ranks)):
        raise WeightsError(f"version {first.version} has shares of ranks {[part.rank for part in parts]}")
    if len({(part.version, part.ranks, _layout(part)) for part in parts}) > 1:
        raise WeightsError(f"version {first.version}: the ranks do not publish the same tensors")
    if len(bases := {part.base_version for part in parts} - {None}) > 1:
        raise WeightsError(f"version {first.version}: the ranks' deltas are to versions {sorted(map(str, bases))}")
    pieces: list[TensorChunk] = []
    bucket_bytes: list[int] = []
    for part in parts:
        pieces += [structs.replace(piece, bucket=piece.bucket + len(bucket_bytes)) for piece in part.pieces]
        bucket_bytes += part.bucket_bytes
    joined = structs.replace(
        first,
        base_version=next(iter(bases), None),
        tensors=_sum_hashes([part.tensors for part in parts]),
        pieces=tuple(pieces),
        bucket_bytes=tuple(bucket_bytes),
        rank=0,
        ranks=1,
        frozen=_sum_hashes([part.frozen for part in parts]),
    )
    check_whole(joined)
    return joined


def _sum_hashes(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    columns = zip(*parts, strict=True)
    return tuple(structs.replace(same[0], content=sum(shard.content for shard in same) % 2**64) for same in columns)


def check_whole(push: Push) -> None:
    """Raise `WeightsError` unless the pieces of `push` cover each byte of its tensors exactly once."""
    ends = [0] * len(push.tensors)
    for piece in sorted(push.pieces, key=lambda piece: (piece.tensor, piece.first)):
        if not 0 <= piece.tensor < len(ends) or piece.first != ends[piece.tensor]:
            raise WeightsError(f"version {push.version}: its pieces leave out a byte, or contain it twice")
        ends[piece.tensor] += piece.nbytes
    for tensor, end in zip(push.tensors, ends, strict=True):
        if end != tensor.nbytes:
            raise WeightsError(f"version {push.version}: {end} of {tensor.nbytes} bytes of {tensor.name!r} arrived")


def _layout(part: Push) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((tensor.name, tensor.dtype, tensor.shape) for tensor in part.tensors + part.frozen)
