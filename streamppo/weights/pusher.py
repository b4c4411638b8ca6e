"""Every rank pushes its own shards beside training; engines pull.

Push   consumes a rank's share of a version in buckets    produces a version in the ledger, once all shares are there
       waits for the push before it                        unblocks every engine's pull and the queue's next take

Two sets of buckets take turns: the learner writes a version into one, while the other is being pushed.
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
"""Sets of buckets: one is written, one is read."""


Publish: TypeAlias = Callable[[bytes, list[BucketRef], bytes], PublishReply]
"""Publishes an encoded `Push` with its buckets, and the encoded `Learned` of its batch; waits for all shares."""


class PushedVersion(NamedTuple):
    """A published version: the hash of its weights, the milliseconds that its push took, this rank's bytes of it."""

    digest: str
    ms: float
    nbytes: int


class Pusher:
    """Hashes one rank's shares of versions, puts them into `outlet` and publishes them, in a thread, in their order.

    At most one push is under way: `push` waits for the one before, so memory holds two versions at most. Nobody
    waits for an engine. `last` is the newest push. With `deltas` a version is described by what has changed since the
    one before, where that is less, until the ledger wants a whole one again. Tensors that are `frozen` are
    described in each, and do not travel. Buckets are `pinned` for a learner on a GPU.
    """

    def __init__(
        self,
        publish: Publish,
        outlet: Sender,
        bucket_bytes: int,
        *,
        deltas: bool = False,
        rank: int = 0,
        ranks: int = 1,
        frozen: tuple[Tensor, ...] = (),
        pinned: bool = False,
    ) -> None:
        self._publish, self._outlet = publish, outlet
        self._bucket_bytes, self._deltas = bucket_bytes, deltas
        self._rank, self._ranks, self._frozen, self._pinned = rank, ranks, frozen, pinned
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self.last: Future[PushedVersion] = Future()
        self.last.set_result(PushedVersion("", 0.0, 0))
        self._sets: list[Buckets] = []
        self._described: Future[None] = Future()
        self._described.set_result(None)
        self._wants_whole = True
        self._carried: dict[int, tuple[bytes, list[BucketRef], bytes]] = {}

    def buckets(self, like: Mapping[str, Shard]) -> Buckets:
        """The buckets of the next version, which has the layout of `like`; no push reads them.

        Waits until the push under way has compared its version with the one before, whose memory this is.
        """
        if len(self._sets) < SETS:
            return Buckets(like, self._bucket_bytes, pinned=self._pinned)
        self._described.result()
        return self._sets.pop(0)

    def push(
        self,
        version: int,
        filled: Buckets,
        learned: bytes = b"",
        admitted_lag: int | None = None,
        written: Callable[[], None] = lambda: None,
    ) -> PushedVersion:
        """Start pushing what is in `filled` once `written` returns. Returns the push before.

        `learned`, of the batch that made the version, goes along, and the lag to be admitted with it. Raises
        the error of the push before.
        """
        pushed = self.last.result()
        before = self._sets[-1] if self._deltas and self._sets and not self._wants_whole else None
        self._sets.append(filled)
        self._described = Future()
        self.last = self._thread.submit(self._push, version, filled, before, learned, admitted_lag, written)
        return pushed

    def republish(self) -> list[Future[PublishReply]]:
        """Publish the newest whole version once more, and all deltas since: the ledger has forgotten everything.

        Each waits in a thread of its own for the shares of the other ranks, which may come in another order, or, of a
        version that they need no more, not at all.
        """
        carried = list(self._carried.values())
        threads = ThreadPoolExecutor(max_workers=max(1, len(carried)), thread_name_prefix="push again")
        sent = [threads.submit(self._publish, *one) for one in carried]
        threads.shutdown(wait=False)
        return sent

    @phase("publish")
    def _push(
        self,
        version: int,
        filled: Buckets,
        before: Buckets | None,
        learned: bytes,
        admitted_lag: int | None,
        written: Callable[[], None],
    ) -> PushedVersion:
        start = time.perf_counter()
        try:
            written()
            push, arrays = filled.push(version, before, rank=self._rank, ranks=self._ranks)
        finally:
            self._described.set_result(None)
        encoded = encode(structs.replace(push, admitted_lag=admitted_lag, frozen=self._frozen))
        refs = self._outlet.put(version, arrays)
        self._carried[version] = encoded, refs, learned
        published = self._publish(encoded, refs, learned)
        self._carried = {number: one for number, one in self._carried.items() if number >= published.whole}
        self._outlet.drop(published.whole)
        self._wants_whole = published.wants_whole
        ms = (time.perf_counter() - start) * 1e3
        return PushedVersion(published.digest, ms, sum(array.nbytes for array in arrays))
