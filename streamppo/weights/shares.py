"""Brings together what the ranks of a learner publish of one version."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import structs

from streamppo.errors import WeightsError
from streamppo.types import Push, Tensor, TensorChunk

if TYPE_CHECKING:
    from ray import ObjectRef

EncodedRecord: TypeAlias = "bytes | list[ObjectRef[bytes]]"
"""An encoded `TokenRecord`, empty without a batch; or, for a queue with shards, a reference of it."""
T = TypeVar("T")
R = TypeVar("R")
REMEMBERED = 64
"""Versions whose results are kept for a rank that asks once more."""


class RankShare(NamedTuple, Generic[T]):
    """One rank's part of a version, with references, of type T, of its buckets; `learned` comes from rank 0."""

    push: Push
    refs: list[T]
    learned: EncodedRecord


class Shares(Generic[T]):
    """The shares of versions of which not every rank has brought its own."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, RankShare[T]]] = {}

    def add(self, share: RankShare[T]) -> list[RankShare[T]]:
        """Return the shares of a version, by rank, as soon as every rank has brought its own; nothing before.

        Of two shares by one rank the last counts.
        """
        shares = self._waiting.setdefault(share.push.version, {})
        shares[share.push.rank] = share
        if len(shares) < share.push.ranks:
            return []
        del self._waiting[share.push.version]
        return [shares[rank] for rank in sorted(shares)]


class ShareCollector(Generic[T, R]):
    """One learner's versions: `publish` is called once for each, and all of its ranks wait for that result.

    A rank that brings its share of a version again, which Ray may do to a call, gets the result at once; a share with
    other weights is published anew.
    """

    def __init__(self, publish: Callable[[RankShare[T]], Awaitable[R]]) -> None:
        self._publish = publish
        self._shares = Shares[T]()
        self._begun: dict[int, asyncio.Future[asyncio.Task[R]]] = {}
        self._brought: dict[int, dict[int, str]] = {}

    async def result(self, share: RankShare[T]) -> R:
        """Add a share, and wait for the result of its version. Raises what publishing it raised, and as `join` does."""
        version, rank, digest = share.push.version, share.push.rank, share.push.digest
        if self._brought.setdefault(version, {}).setdefault(rank, digest) != digest:
            self._begun.pop(version, None)
            self._brought[version] = {rank: digest}
        if version not in self._begun:
            self._begun[version] = asyncio.get_running_loop().create_future()
            self._begun.pop(version - REMEMBERED, None)
            self._brought.pop(version - REMEMBERED, None)
        begun = self._begun[version]
        if not begun.done() and (shares := self._shares.add(share)):
            begun.set_result(asyncio.create_task(self._make(shares)))
        task = await asyncio.shield(begun)
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and task.exception() is not None and self._begun.get(version) is begun:
                del self._begun[version]

    async def _make(self, shares: Sequence[RankShare[T]]) -> R:
        refs = [ref for one in shares for ref in one.refs]
        return await self._publish(RankShare(join([one.push for one in shares]), refs, shares[0].learned))


def join(parts: Sequence[Push]) -> Push:
    """Describe a version by the shares of all ranks, whose buckets follow one another.

    Raises `WeightsError` if they are not the shares of one version, or leave out a byte or have it twice.
    """
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
    """The tensors of all ranks: the hash of each is the sum of those of its shards."""
    columns = zip(*parts, strict=True)
    return tuple(structs.replace(same[0], content=sum(one.content for one in same) % 2**64) for same in columns)


def check_whole(push: Push) -> None:
    """Raise `WeightsError` unless the pieces of `push` are each byte of its tensors exactly once."""
    ends = [0] * len(push.tensors)
    for piece in sorted(push.pieces, key=lambda piece: (piece.tensor, piece.first)):
        if not 0 <= piece.tensor < len(ends) or piece.first != ends[piece.tensor]:
            raise WeightsError(f"version {push.version}: its pieces leave out a byte, or have it twice")
        ends[piece.tensor] += piece.nbytes
    for tensor, end in zip(push.tensors, ends, strict=True):
        if end != tensor.nbytes:
            raise WeightsError(f"version {push.version}: {end} of {tensor.nbytes} bytes of {tensor.name!r} came")


def _layout(part: Push) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((tensor.name, tensor.dtype, tensor.shape) for tensor in part.tensors + part.frozen)
