"""The recent failure rate of slots, and the error that ends a run in which it is too high."""

from collections import deque

from streamppo.errors import TooManyFailures
from streamppo.queue.rules.slot import Slot

WINDOW = 256
"""Slots over which the failure rate is computed."""
FEWEST = 64
"""Fewest slots for which the rate is checked."""
QUOTED = 3
"""Maximum distinct reasons in the error."""


class FailureWindow:
    """The outcomes of the first attempts at the last `WINDOW` slots; empty after a queue is rebuilt."""

    def __init__(self, max_rate: float) -> None:
        self._max_rate = max_rate
        self._reasons: deque[str | None] = deque(maxlen=WINDOW)

    def add(self, slot: Slot, reason: str | None) -> None:
        """Record that an attempt at `slot` failed with `reason`, or succeeded (None).

        Only a slot's first attempt counts: retries come before new slots, so that prompts that always fail would be
        counted several times.
        """
        if slot.failures == 0:
            self._reasons.append(reason)

    def check(self) -> None:
        """Raise `TooManyFailures` if the failure rate is above `max_rate`."""
        if len(self._reasons) < FEWEST:
            return
        reasons = [reason for reason in self._reasons if reason is not None]
        rate = len(reasons) / len(self._reasons)
        if rate <= self._max_rate:
            return
        quoted = "; ".join(list(dict.fromkeys(reasons))[:QUOTED])
        raise TooManyFailures(
            f"{rate:.0%} of the last {len(self._reasons)} trajectories failed "
            f"(queue.max_failure_rate is {self._max_rate:.0%}): {quoted}"
        )
