"""Keeps an engine at the newest version.

consumes     versions from the ledger
produces     swaps of the engine
waits for    a version that is newer than the engine's
unblocks     evaluations that wait for a version, and tickets that wait for a newer engine
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ray.exceptions import ObjectLostError

from streamppo.errors import RunError, WeightsError
from streamppo.process import phase
from streamppo.rollout.adapters import Source
from streamppo.rollout.engine import Engine
from streamppo.types import Push, decode
from streamppo.weights.delta import Bytes
from streamppo.weights.replica import Replica

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor

PULLS = 3
"""A version is pulled this often at most."""
RETRY_S = 0.5
"""Seconds between two attempts to get weights whose owner has died."""
SWAP_S, SLOWEST_BYTES_PER_S = 300.0, 50e6
"""A swap that takes longer than this, and a second for so many bytes, hangs."""
log = logging.getLogger(__name__)


class Follower:
    """Swaps every new version into `engine`, which has begun with what `replica` holds.

    `digest` follows the engine, and `admitted_lag` the lag that the learner admits, if it steers it; `push_ms` are the
    milliseconds that all swaps took together.
    """

    def __init__(
        self, name: str, queue: "ActorProxy[QueueActor]", engine: Engine, replica: Replica, source: Source
    ) -> None:
        assert replica.push is not None, "an engine begins with a version"
        self.engine, self.digest = engine, replica.push.digest
        self.admitted_lag = replica.push.admitted_lag
        self.push_ms = 0.0
        self._name, self._queue, self._replica, self._source = name, queue, replica, source
        self._swapped = asyncio.Condition()

    async def run(self) -> None:
        """Swap to the newest version without end; versions that came and went during a swap are never pulled alone.

        After bytes that were damaged on the way a whole version is asked for. Raises `WeightsError` after `PULLS`
        refusals in a row: then the way is not the reason. Raises `RunError` if a swap hangs.
        """
        refusals = 0
        while True:
            try:
                push = await pull(self._queue, self._name, self._replica, self.engine.version)
                start = time.perf_counter()
                self.admitted_lag = push.admitted_lag
                await self._swap(push)
            except WeightsError as error:
                log.info("keeps version %d: %s", self.engine.version, error)
                self._replica.forget()
                refusals += 1
                if refusals == PULLS:
                    raise
                continue
            refusals = 0
            self.push_ms += (time.perf_counter() - start) * 1e3
            self.digest = push.digest
            async with self._swapped:
                self._swapped.notify_all()

    async def _swap(self, push: Push) -> None:
        nbytes = sum(tensor.nbytes for tensor in push.tensors + push.frozen)
        limit_s = SWAP_S + nbytes / SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(limit_s):
                tensors, contents = await self._source.of(self._replica)
                await self.engine.update_weights(push.version, tensors, contents)
        except TimeoutError:
            size = f"{nbytes / 2**30:.1f} GiB"
            raise RunError(
                f"{self._name}: the swap to version {push.version} ({size}) hangs: {limit_s:.0f} s have passed"
            ) from None

    async def reach(self, version: int) -> None:
        """Wait until the engine holds `version` or a newer one."""
        async with self._swapped:
            await self._swapped.wait_for(lambda: self.engine.version >= version)


async def pull(queue: "ActorProxy[QueueActor]", name: str, replica: Replica, version: int) -> Push:
    """Wait for a version above `version`, which the engine holds, and make it in `replica`. Returns it.

    Raises `WeightsError` if what came does not make a version.
    """
    while True:
        found = await queue.weights_after.remote(name, version, replica.version)
        if not found:
            continue
        try:
            fetched = [await asyncio.gather(*refs) for _, refs in found]
        except ObjectLostError:
            # The learner died with its weights; the next learner brings them again.
            await asyncio.sleep(RETRY_S)
            continue
        pushes = [decode(push, Push) for push, _ in found]
        await asyncio.to_thread(_take, replica, pushes, fetched)
        return pushes[-1]


@phase("unpack")
def _take(replica: Replica, pushes: Sequence[Push], fetched: Sequence[Sequence[Bytes]]) -> None:
    for push, buckets in zip(pushes, fetched, strict=True):
        replica.take(push, buckets)
