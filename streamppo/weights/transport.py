"""Buckets through the Ray object store: the learner pushes beside training, engines pull.

Push   consumes a version in buckets                     produces a version in the ledger
       waits for the push before it                       unblocks every engine's pull and the queue's next take

Two sets of buckets take turns: the learner writes a version into one, while the other is being pushed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import numpy as np
import ray
import torch
from msgspec import structs
from numpy.typing import NDArray

from streamppo.process import phase
from streamppo.types import Push, decode, encode
from streamppo.weights import buckets
from streamppo.weights.buckets import Buckets

BucketRef: TypeAlias = ray.ObjectRef[NDArray[np.uint8]]
"""A bucket in the object store."""

SETS = 2
"""Sets of buckets: one is written, one is read."""


class Pushed(NamedTuple):
    """A published version: the hash of its bytes, and the milliseconds that its push took."""

    digest: str
    ms: float


class Pusher:
    """Checksums and publishes versions in a thread of its own, in their order.

    At most one push is under way: `push` waits for the one before, so memory holds two versions at most. Nobody
    waits for an engine. `last` is the newest push. `publish` gets the encoded `Push`, its buckets and `learned`.
    """

    def __init__(self, publish: Callable[[bytes, list[BucketRef], bytes], None], bucket_bytes: int) -> None:
        self._publish = publish
        self._bucket_bytes = bucket_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self.last: Future[Pushed] = Future()
        self.last.set_result(Pushed("", 0.0))
        self._base: int | None = None
        self._sets: list[Buckets] = []
        self._carried: tuple[bytes, list[BucketRef], bytes] | None = None

    def buckets(self, like: Mapping[str, torch.Tensor]) -> Buckets:
        """The buckets of the next version, which has names, shapes and types of `like`; no push reads them."""
        if len(self._sets) < SETS:
            return Buckets(like, self._bucket_bytes)
        return self._sets.pop(0)

    def push(self, version: int, filled: Buckets, learned: bytes = b"", admitted_lag: int | None = None) -> float:
        """Start pushing what is in `filled`. Returns the milliseconds of the push before.

        `learned`, of the batch that made the version, goes along, and the lag to be admitted with it. Raises
        the error of the push before.
        """
        before = self.last.result()
        self._sets.append(filled)
        self.last = self._thread.submit(self._carry, version, filled, learned, admitted_lag)
        return before.ms

    def again(self) -> None:
        """Publish the last version once more, after the push under way: the ledger has forgotten everything."""
        if self._carried is not None:
            self._thread.submit(lambda: self._carried and self._publish(*self._carried))

    @phase("publish")
    def _carry(self, version: int, filled: Buckets, learned: bytes, admitted_lag: int | None) -> Pushed:
        start = time.perf_counter()
        push = structs.replace(filled.push(version, self._base), admitted_lag=admitted_lag)
        self._carried = encode(push), [ray.put(array) for array in filled.arrays], learned
        self._publish(*self._carried)
        self._base = version
        return Pushed(push.digest, (time.perf_counter() - start) * 1e3)


@phase("verify")
def unpack(push_bytes: bytes, fetched: Sequence[NDArray[np.uint8]]) -> tuple[Push, dict[str, torch.Tensor]]:
    """Verify one version's fetched buckets. Raises `WeightsError` when bytes and checksums differ."""
    push = decode(push_bytes, Push)
    return push, buckets.unflatten(push, fetched)
