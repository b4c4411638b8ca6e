"""Assembles new versions from the buckets of the learner's ranks, while the engine decodes.

consumes     versions from the ledger
produces     the newest version in a replica
waits for    a version that is newer than the engine's
unblocks     the next swap of `WeightSync`
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from streamppo.process import phase
from streamppo.types import Push, decode
from streamppo.weights.delta import Bytes
from streamppo.weights.replica import Replica
from streamppo.weights.shared_memory import SharedTensors
from streamppo.weights.transport import BucketGone, BucketRef, Receiver

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor

RETRY_S = 0.5
AHEAD = 2
"""The number of buckets fetched while one is unpacked."""


class Puller:
    """Pulls versions for the actor `name` from the ledger in `queue`, through `receiver`, into `replica`."""

    def __init__(
        self,
        name: str,
        queue: "ActorProxy[QueueActor]",
        receiver: Receiver,
        memory: Callable[[Sequence[int]], SharedTensors] | None = None,
    ) -> None:
        self.name, self.queue, self.replica = name, queue, Replica(memory)
        self._receiver = receiver

    async def newer(self, version: int) -> Push:
        """Wait for a version above the engine's `version`, pull it and return it. Raises `WeightsError`."""
        while True:
            pushes = await self.queue.weights_after.remote(self.name, version, self.replica.version)
            try:
                for push, refs in pushes:
                    await self._take(decode(push, Push), refs)
            except BucketGone:
                # The learner is dead, or has replaced these weights by newer ones.
                await asyncio.sleep(RETRY_S)
                continue
            if pushes:
                assert self.replica.push is not None, "a version was made"
                return self.replica.push

    async def _take(self, push: Push, refs: Sequence[BucketRef]) -> None:
        if push.base_version is not None:
            # A delta changes the present version in place, so it is applied only after all its buckets have arrived.
            fetched = await asyncio.gather(*map(self._receiver.fetch, refs))
            await asyncio.to_thread(self._take_all, push, fetched)
            return
        self.replica.begin(push)
        async with aclosing(self._fetch_buckets(refs)) as fetched:
            async for bucket in fetched:
                await asyncio.to_thread(self._put, bucket)
        self.replica.finish()

    async def _fetch_buckets(self, refs: Sequence[BucketRef]) -> AsyncGenerator[Bytes]:
        to_fetch, under_way = deque(refs), deque[asyncio.Future[Bytes]]()
        try:
            while to_fetch or under_way:
                while to_fetch and len(under_way) < AHEAD:
                    under_way.append(asyncio.ensure_future(self._receiver.fetch(to_fetch.popleft())))
                bucket = await under_way.popleft()
                if to_fetch:
                    under_way.append(asyncio.ensure_future(self._receiver.fetch(to_fetch.popleft())))
                yield bucket
        finally:
            for fetch in under_way:
                fetch.cancel()

    @phase("unpack")
    def _put(self, bucket: Bytes) -> None:
        self.replica.put(bucket)

    @phase("unpack")
    def _take_all(self, push: Push, fetched: Sequence[Bytes]) -> None:
        self.replica.take(push, fetched)
