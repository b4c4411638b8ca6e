"""Actors that Ray takes for living and that give no sign of life: stopped, or held by a function that never returns.

Rollout actors and ranks tell the queue every `BEAT_S` that they live, each beside its work: neither a long swap nor a
long collective is silence.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from streamppo.driver.watch.watch import RunStage, WatchedCalls

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor


class Heartbeats:
    """Calls `on_silence` with the name of every actor that the queue has not heard for `limit_s`, and the reason."""

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
        """Ask the queue about `actors`, by the names under which they call it; four times within the limit."""
        if time.monotonic() - self._checked < self._limit_s / 4:
            return
        asked = self._checked = time.monotonic()

        def tell(silent: list[str]) -> None:
            # A queue that answers late was stopped itself, and has yet to read the signs of life of that time.
            if time.monotonic() - asked < self._limit_s / 4:
                for name in silent:
                    self._on_silence(name, f"silent for more than {self._limit_s:g} s")

        self._calls.watch(self._queue.silent.remote(list(actors), self._limit_s), RunStage.QUEUE, tell)
