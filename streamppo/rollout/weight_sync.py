"""Keeps an engine at the newest version.

consumes     versions of a puller
produces     swaps of the engine
waits for    a version that is newer than the engine's
unblocks     evaluations that wait for a version, and tickets that wait for a newer engine
"""

import asyncio
import logging
import time

from streamppo.errors import RunError, WeightsError
from streamppo.rollout.engine import Engine
from streamppo.rollout.puller import Puller
from streamppo.types import Push
from streamppo.weights.adapters import EngineTensors

PULLS = 3
"""`WeightSync` fails after this number of successive pulls or swaps that raise `WeightsError`."""
SWAP_S, SLOWEST_BYTES_PER_S = 300.0, 50e6
"""Timeout of a swap: `SWAP_S` + bytes / `SLOWEST_BYTES_PER_S` seconds."""
log = logging.getLogger(__name__)


class WeightSync:
    """Swaps every new version of `puller` into `engine`, whose first version is in the puller's replica.

    `digest` is of the engine's version. `admitted_lag` is the newest push's, or None. `push_ms` is the time of all
    swaps.
    """

    def __init__(self, puller: Puller, engine: Engine, source: EngineTensors) -> None:
        push = puller.replica.push
        assert push is not None, "an engine begins with a version"
        self.engine, self.digest = engine, push.digest
        self.admitted_lag = push.admitted_lag
        self.push_ms = 0.0
        self._puller, self._source = puller, source
        self._swapped = asyncio.Condition()

    async def run(self) -> None:
        """Swap to every new version, in an endless loop; of several new versions, only the newest is used.

        Pulls a full version after a `WeightsError`; raises it after `PULLS` of them, and `RunError` if a swap hangs.
        """
        refusals = 0
        while True:
            try:
                push = await self._puller.newer(self.engine.version)
                start = time.perf_counter()
                self.admitted_lag = push.admitted_lag
                await self._swap(push)
            except WeightsError as error:
                log.info("keeps version %d: %s", self.engine.version, error)
                self._puller.replica.forget()
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
                tensors, contents = await self._source.materialize(self._puller.replica)
                await self.engine.update_weights(push.version, tensors, contents)
        except TimeoutError:
            size = f"{nbytes / 2**30:.1f} GiB"
            raise RunError(
                f"{self._puller.name}: the swap to version {push.version} ({size}) hangs: {limit_s:.0f} s have passed"
            ) from None

    async def reach(self, version: int) -> None:
        async with self._swapped:
            await self._swapped.wait_for(lambda: self.engine.version >= version)
