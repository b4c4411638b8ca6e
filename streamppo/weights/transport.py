"""Buckets through the Ray object store: the learner pushes beside training, engines pull.

Push   consumes a snapshot (HF names -> CPU tensors)     produces a version in the ledger
       waits for the push before it                       unblocks every engine's pull and the queue's next take
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import torch

from streamppo.types import Push, decode, encode
from streamppo.weights import buckets


class Pusher:
    """Encodes, checksums and publishes snapshots in a thread of its own, in order of version.

    At most one push is under way: `push` waits for the one before, so memory holds two snapshots at most. Nobody
    waits for an engine.
    """

    def __init__(self, publish: Callable[[bytes, list[Any]], None], bucket_bytes: int) -> None:
        self._publish = publish
        self._bucket_bytes = bucket_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self._under_way: Future[float] | None = None
        self._base: int | None = None
        self._last: tuple[bytes, list[Any]] | None = None
        self.digest = ""

    def push(self, version: int, snapshot: Mapping[str, torch.Tensor]) -> float:
        """Start pushing `snapshot`, which must not change any more. Returns the milliseconds of the push before.

        Raises what that push raised.
        """
        took_ms = self.wait()
        self._under_way = self._thread.submit(self._carry, version, snapshot)
        return took_ms

    def wait(self) -> float:
        """Until the push under way is published; its milliseconds, or 0."""
        under_way, self._under_way = self._under_way, None
        return under_way.result() if under_way else 0.0

    def again(self) -> None:
        """The ledger has forgotten everything: publish the last version once more, after what is under way."""
        if self._last is not None:
            self._thread.submit(lambda: self._last and self._publish(*self._last))

    def _carry(self, version: int, snapshot: Mapping[str, torch.Tensor]) -> float:
        start = time.perf_counter()
        push, arrays = buckets.flatten(version, self._base, snapshot, self._bucket_bytes)
        self._last = encode(push), [ray.put(array) for array in arrays]
        self._publish(*self._last)
        self._base, self.digest = version, push.digest
        return (time.perf_counter() - start) * 1e3


def unpack(push_bytes: bytes, fetched: Sequence[Any]) -> tuple[Push, dict[str, torch.Tensor]]:
    """Verify one version's fetched buckets. Raises `WeightsError` when bytes and checksums differ."""
    push = decode(push_bytes, Push)
    return push, buckets.unflatten(push, fetched)
