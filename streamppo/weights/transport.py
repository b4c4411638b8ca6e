"""Buckets through the Ray object store: the learner pushes beside training, engines pull.

Push   consumes a snapshot (HF names -> CPU tensors)     produces a version in the ledger
       waits for the push before it                       unblocks every engine's pull and the queue's next take
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from streamppo.process import phase
from streamppo.types import Push, decode, encode
from streamppo.weights import buckets

BucketRef: TypeAlias = ray.ObjectRef[NDArray[np.uint8]]
"""A bucket in the object store."""


class Pushed(NamedTuple):
    """A published version: the hash of its bytes, and the milliseconds that its push took."""

    digest: str
    ms: float


class Pusher:
    """Encodes, checksums and publishes snapshots in a thread of its own, in order of version.

    At most one push is under way: `push` waits for the one before, so memory holds two snapshots at most. Nobody
    waits for an engine. `last` is the newest push. `publish` gets the encoded `Push`, its buckets and the values.
    """

    def __init__(self, publish: Callable[[bytes, list[BucketRef], bytes], None], bucket_bytes: int) -> None:
        self._publish = publish
        self._bucket_bytes = bucket_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self.last: Future[Pushed] = Future()
        self.last.set_result(Pushed("", 0.0))
        self._base: int | None = None
        self._carried: tuple[bytes, list[BucketRef], bytes] | None = None

    def push(self, version: int, snapshot: Mapping[str, torch.Tensor], values: bytes = b"") -> float:
        """Start pushing `snapshot`, which must not change any more. Returns the milliseconds of the push before.

        `values`, the critic's of the batch that made the version, go along. Raises the error of the push before.
        """
        before = self.last.result()
        self.last = self._thread.submit(self._carry, version, snapshot, values)
        return before.ms

    def again(self) -> None:
        """Publish the last version once more, after the push under way: the ledger has forgotten everything."""
        if self._carried is not None:
            self._thread.submit(lambda: self._carried and self._publish(*self._carried))

    @phase("publish")
    def _carry(self, version: int, snapshot: Mapping[str, torch.Tensor], values: bytes) -> Pushed:
        start = time.perf_counter()
        push, arrays = buckets.flatten(version, self._base, snapshot, self._bucket_bytes)
        self._carried = encode(push), [ray.put(array) for array in arrays], values
        self._publish(*self._carried)
        self._base = version
        return Pushed(push.digest, (time.perf_counter() - start) * 1e3)


@phase("verify")
def unpack(push_bytes: bytes, fetched: Sequence[NDArray[np.uint8]]) -> tuple[Push, dict[str, torch.Tensor]]:
    """Verify one version's fetched buckets. Raises `WeightsError` when bytes and checksums differ."""
    push = decode(push_bytes, Push)
    return push, buckets.unflatten(push, fetched)
