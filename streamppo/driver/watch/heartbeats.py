"""Finds actors that are alive for Ray and send no heartbeat: stopped, or in a function that never returns.

Rollout actors and ranks send the queue a heartbeat every `BEAT_S`, concurrently with their work: neither a long swap
nor a long collective delays it.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from streamppo.driver.watch.watch import RunStage, WatchedCalls

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor


class Heartbeats:
    """Calls `on_silence` with name and reason for every actor whose last heartbeat is older than `limit_s`."""

    def __init__(
        self,
        queue: "ActorProxy[QueueActor]",
        calls: WatchedCalls,
        on_silence: Callable[[str, str], None],
        limit_s: float,
    ) -> None:
        self._queue = queue
        self._calls = calls
        self._on_silence = on_silence
        self._limit_s = limit_s
        self._checked = time.monotonic()

    def check(self, actors: Sequence[str]) -> None:
        """Ask the queue which of `actors`, by their names, are silent; at most four times within `limit_s`."""
        if time.monotonic() - self._checked < self._limit_s / 4:
            return
        asked_s = self._checked = time.monotonic()

        def tell(silent: list[str]) -> None:
            # A queue that answers late was itself stopped, and has not yet read the heartbeats of that time.
            if time.monotonic() - asked_s < self._limit_s / 4:
                for name in silent:
                    self._on_silence(name, f"silent for more than {self._limit_s:g} s")

        self._calls.watch(self._queue.silent.remote(list(actors), self._limit_s), RunStage.QUEUE, tell)
