"""Prefetch of batches: each batch is fetched and padded in a thread during the previous update.

With several ranks, each rank fetches the outline of a batch (all columns except tokens), finds the rows that it needs,
and fetches only their tokens.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import numpy as np
import ray
from ray.actor import ActorProxy
from ray.exceptions import ObjectLostError

from streamppo import process
from streamppo.errors import JournalError
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.queue.batch_source import BatchSource
from streamppo.queue.store import batch_parts
from streamppo.types import Batch, Outline, Tokens, decode

RETRY_S = 0.5
"""Seconds between retries to fetch a batch whose owner has died."""

RankRows: TypeAlias = Callable[[PaddedBatch], list[int]]


class FetchedBatch(NamedTuple):
    """A batch, its number of tokens by lag, and the seconds that its fetch took."""

    batch: PaddedBatch
    lags: dict[int, int]
    fetch_s: float


class Fetcher:
    """Fetches at most one batch ahead: `start` begins a fetch, `result` waits for it."""

    def __init__(self, source: ActorProxy[BatchSource]) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch")
        self._under_way: Future[FetchedBatch | None] = Future()

    def start(self, version: int, rank_rows: RankRows | None) -> None:
        """Start to fetch the batch of the update that starts at `version`, with all tokens if `rank_rows` is None."""
        self._under_way = self._thread.submit(self._fetch, version, rank_rows)

    def result(self) -> FetchedBatch | None:
        """Wait for the batch of the last `start`; None if the run was stopped."""
        return self._under_way.result()

    def of_archive(self, run: str) -> Iterator[PaddedBatch]:
        """Yield another run's batches, in order. Raises `JournalError` without batches and for damage."""
        versions = ray.get(self._source.archived_versions.remote(run))
        if not versions:
            raise JournalError(f"{run}: no archived batch to train the critic on")
        for version in versions:
            yield pad(decode(ray.get(self._source.archived_batch.remote(run, version)), Batch))

    def _fetch(self, version: int, rank_rows: RankRows | None) -> FetchedBatch | None:
        begin = time.perf_counter()
        fetched = self._retry(version, rank_rows)
        process.add("fetch", time.perf_counter() - begin)
        if fetched is None:
            return None
        batch = pad(fetched)
        return FetchedBatch(batch, lag_histogram(batch), time.perf_counter() - begin)

    def _retry(self, version: int, rank_rows: RankRows | None) -> Batch | None:
        while True:
            try:
                return self._fetch_whole(version) if rank_rows is None else self._fetch_rank_rows(version, rank_rows)
            except ObjectLostError:
                # The object was lost with the queue's process; the restarted queue has the same batch.
                time.sleep(RETRY_S)

    def _fetch_whole(self, version: int) -> Batch | None:
        refs = ray.get(self._source.take.remote(version, "whole"))
        return None if refs is None else batch_parts.merge([decode(part.data, Batch) for part in ray.get(refs)])

    def _fetch_rank_rows(self, version: int, rank_rows: RankRows) -> Batch | None:
        if (refs := ray.get(self._source.take.remote(version, "outline"))) is None:
            return None
        outline = batch_parts.merge_outlines([decode(piece.data, Outline) for piece in ray.get(refs)])
        rows = rank_rows(pad(batch_parts.join(outline, [])))
        row_bytes = np.array(rows, dtype="<i4").tobytes()
        if (refs := ray.get(self._source.take.remote(version, row_bytes))) is None:
            return None
        tokens = [piece for part in ray.get(refs) for piece in decode(part.data, tuple[Tokens, ...])]
        return batch_parts.join(outline, tokens)


def lag_histogram(batch: PaddedBatch) -> dict[int, int]:
    """The number of sampled tokens of a batch at each lag, in versions."""
    lags, counts = batch.lag_BT[batch.mask_BT].unique(return_counts=True)
    return dict(zip(lags.tolist(), counts.tolist(), strict=True))
