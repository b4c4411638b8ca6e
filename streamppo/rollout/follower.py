"""Keeps an engine at the newest version.

consumes     versions from the ledger
produces     swaps of the engine
waits for    a version that is newer than the engine's
unblocks     evaluations that wait for a version, and tickets that wait for a newer engine
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import torch
from ray.exceptions import ObjectLostError

from streamppo.errors import WeightsError
from streamppo.rollout.engine import Engine
from streamppo.types import Push
from streamppo.weights.transport import unpack

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor

PULLS = 3
"""A version is pulled this often at most."""
RETRY_S = 0.5
"""Seconds between two attempts to get weights whose owner has died."""
log = logging.getLogger(__name__)


class Follower:
    """Swaps every new version into `engine`, which holds the weights that hash to `digest`.

    `digest` follows the engine; `push_ms` are the milliseconds that all swaps took together.
    """

    def __init__(self, name: str, queue: "ActorProxy[QueueActor]", engine: Engine, digest: str) -> None:
        self.engine, self.digest = engine, digest
        self.push_ms = 0.0
        self._name, self._queue = name, queue
        self._swapped = asyncio.Condition()

    async def run(self) -> None:
        """Swap to the newest version without end; versions that came and went during a swap are never pulled.

        Bytes that were damaged on the way are asked for again. Raises `WeightsError` after `PULLS` refusals in a row:
        then the way is not the reason.
        """
        refusals = 0
        while True:
            try:
                push, tensors = await pull(self._queue, self._name, self.engine.version)
                start = time.perf_counter()
                await self.engine.update_weights(push.version, tensors)
            except WeightsError as error:
                log.info("keeps version %d: %s", self.engine.version, error)
                refusals += 1
                if refusals == PULLS:
                    raise
                continue
            refusals = 0
            self.push_ms += (time.perf_counter() - start) * 1e3
            self.digest = push.digest
            await self._queue.swapped.remote(self._name, push.version)
            async with self._swapped:
                self._swapped.notify_all()

    async def reach(self, version: int) -> None:
        """Wait until the engine holds `version` or a newer one."""
        async with self._swapped:
            await self._swapped.wait_for(lambda: self.engine.version >= version)


async def pull(queue: "ActorProxy[QueueActor]", name: str, version: int) -> tuple[Push, dict[str, torch.Tensor]]:
    """Wait for a version above `version` and fetch its tensors. Raises `WeightsError` if their bytes are damaged."""
    while True:
        found = await queue.weights_after.remote(name, version)
        if found is None:
            continue
        push, refs = found
        try:
            return await asyncio.to_thread(unpack, push, await asyncio.gather(*refs))
        except ObjectLostError:
            # The learner died with its weights; the next learner brings them again.
            await asyncio.sleep(RETRY_S)
