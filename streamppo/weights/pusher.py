"""Pushes a rank's shards while training continues. Engines pull them.

Push   consumes a rank's share of a version in buckets    produces a version in the ledger, when all shares are there
       waits for the previous push                         unblocks every engine's pull and the queue's next take

Two sets of buckets alternate: the learner writes a version into one set while the other set is pushed.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

from msgspec import structs

from streamppo.process import phase
from streamppo.types import Tensor, encode
from streamppo.weights.buckets import Buckets, Shard
from streamppo.weights.ledger import PublishReply
from streamppo.weights.transport import BucketRef, Sender

SETS = 2
Publish: TypeAlias = Callable[[bytes, list[BucketRef], bytes], PublishReply]
"""A function that publishes an encoded `Push`, its buckets and the encoded `TokenRecord`, and waits for all ranks."""


class PushedVersion(NamedTuple):
    """A published version: the digest of its weights, its push time in milliseconds, and the bytes of this rank."""

    digest: str
    ms: float
    nbytes: int


class Pusher:
    """Hashes one rank's shares of versions, puts them into `sender` and publishes them, in order, in a thread.

    `push` waits for the previous push, so that memory holds at most two versions, but not for engines. With `deltas`, a
    push contains differences to the previous version if these are smaller, unless the ledger asks for a whole version.
    """

    def __init__(
        self,
        publish: Publish,
        sender: Sender,
        bucket_bytes: int,
        *,
        deltas: bool = False,
        rank: int = 0,
        ranks: int = 1,
        frozen: tuple[Tensor, ...] = (),
        pinned: bool = False,
    ) -> None:
        self._publish, self._sender = publish, sender
        self._bucket_bytes, self._deltas = bucket_bytes, deltas
        self._rank, self._ranks, self._frozen, self._pinned = rank, ranks, frozen, pinned
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self.last: Future[PushedVersion] = Future()
        self.last.set_result(PushedVersion("", 0.0, 0))
        self._sets: list[Buckets] = []
        self._described: Future[None] = Future()
        self._described.set_result(None)
        self._wants_whole = True
        self._pushes: dict[int, tuple[bytes, list[BucketRef], bytes]] = {}

    def buckets(self, like: Mapping[str, Shard]) -> Buckets:
        """Return buckets for the next version, with the layout of `like`, as soon as no push reads them."""
        if len(self._sets) < SETS:
            return Buckets(like, self._bucket_bytes, pinned=self._pinned)
        self._described.result()
        return self._sets.pop(0)

    def push(
        self,
        version: int,
        filled: Buckets,
        record: bytes = b"",
        admitted_lag: int | None = None,
        wait_for_copy: Callable[[], None] = lambda: None,
    ) -> PushedVersion:
        """Start to push `filled` once `wait_for_copy` returns; return the previous push, or raise its error."""
        pushed = self.last.result()
        previous = self._sets[-1] if self._deltas and self._sets and not self._wants_whole else None
        self._sets.append(filled)
        self._described = Future()
        self.last = self._thread.submit(self._push, version, filled, previous, record, admitted_lag, wait_for_copy)
        return pushed

    def republish(self) -> list[Future[PublishReply]]:
        """Publish the newest whole version and all later deltas again, because the ledger has lost its state.

        Each version has its own thread: the shares of other ranks may arrive in another order, or not at all.
        """
        pushes = list(self._pushes.values())
        threads = ThreadPoolExecutor(max_workers=max(1, len(pushes)), thread_name_prefix="push again")
        sent = [threads.submit(self._publish, *entry) for entry in pushes]
        threads.shutdown(wait=False)
        return sent

    @phase("publish")
    def _push(
        self,
        version: int,
        filled: Buckets,
        previous: Buckets | None,
        record: bytes,
        admitted_lag: int | None,
        wait_for_copy: Callable[[], None],
    ) -> PushedVersion:
        start = time.perf_counter()
        try:
            wait_for_copy()
            push, arrays = filled.push(version, previous, rank=self._rank, ranks=self._ranks)
        finally:
            self._described.set_result(None)
        encoded = encode(structs.replace(push, admitted_lag=admitted_lag, frozen=self._frozen))
        refs = self._sender.put(version, arrays)
        self._pushes[version] = encoded, refs, record
        published = self._publish(encoded, refs, record)
        self._pushes = {number: entry for number, entry in self._pushes.items() if number >= published.whole}
        self._sender.drop(published.whole)
        self._wants_whole = published.wants_whole
        ms = (time.perf_counter() - start) * 1e3
        return PushedVersion(published.digest, ms, sum(array.nbytes for array in arrays))
