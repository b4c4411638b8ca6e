"""Batches on their way to a rank: fetched and padded in a thread, while the update before them runs."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import ray
from ray.actor import ActorProxy
from ray.exceptions import ObjectLostError

from streamppo import process
from streamppo.errors import JournalError
from streamppo.learner.batch import PaddedBatch, pad
from streamppo.queue.source import BatchSource
from streamppo.types import Batch, decode

RETRY_S = 0.5
"""Seconds between two attempts to get a batch whose owner has died."""


class Fetched(NamedTuple):
    """A batch, how many of its tokens have each lag, and how long it took to come."""

    batch: PaddedBatch
    lags: dict[int, int]
    fetch_s: float


class Fetcher:
    """At most one batch ahead: `start` asks for it, `result` waits for it."""

    def __init__(self, source: ActorProxy[BatchSource]) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch")
        self._under_way: Future[Fetched | None] = Future()

    def start(self, version: int) -> None:
        """Ask for the batch of the update that starts at `version`."""
        self._under_way = self._thread.submit(self._fetch, version)

    def result(self) -> Fetched | None:
        """The batch that was last asked for; None if the run was stopped."""
        return self._under_way.result()

    def archived(self, run: str) -> Iterator[PaddedBatch]:
        """The batches of another run, in the order in which it was trained on them.

        Raises `JournalError` if there is none, or if the run is damaged.
        """
        versions = ray.get(self._source.archived_versions.remote(run))
        if not versions:
            raise JournalError(f"{run}: no archived batch to teach the critic")
        for version in versions:
            yield pad(decode(ray.get(self._source.archived_batch.remote(run, version)), Batch))

    def _fetch(self, version: int) -> Fetched | None:
        begin = time.perf_counter()
        taken = self._take(version)
        process.add("fetch", time.perf_counter() - begin)
        if taken is None:
            return None
        batch = pad(taken)
        return Fetched(batch, lag_histogram(batch), time.perf_counter() - begin)

    def _take(self, version: int) -> Batch | None:
        while True:
            found = ray.get(self._source.take.remote(version))
            if found is None:
                return None
            try:
                return decode(ray.get(found).data, Batch)
            except ObjectLostError:
                # The queue died with it; its next life has the same batch.
                time.sleep(RETRY_S)


def lag_histogram(batch: PaddedBatch) -> dict[int, int]:
    """How many tokens of a batch that the policy sampled have each lag, in versions."""
    lags, counts = batch.lag_BT[batch.mask_BT].unique(return_counts=True)
    return dict(zip(lags.tolist(), counts.tolist(), strict=True))
