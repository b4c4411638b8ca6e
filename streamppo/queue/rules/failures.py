"""The share of slots that failed of late, and the error that ends a run in which there are too many."""

from collections import deque

from streamppo.errors import TooManyFailures
from streamppo.queue.rules.slot import Slot

WINDOW = 256
"""Slots over which the failure rate is taken."""
FEWEST = 64
"""Slots below which no rate is taken."""
QUOTED = 3
"""Different reasons that the error quotes."""


class FailureWindow:
    """How the first attempts of the last `WINDOW` slots ended. A queue that was rebuilt begins with none."""

    def __init__(self, max_rate: float) -> None:
        self._max_rate = max_rate
        self._reasons: deque[str | None] = deque(maxlen=WINDOW)

    def add(self, slot: Slot, reason: str | None) -> None:
        """Note that an attempt at `slot` failed with `reason`, or succeeded (None).

        A slot counts once, by its first attempt: prompts that always fail are tried again before others.
        """
        if slot.failures == 0:
            self._reasons.append(reason)

    def check(self) -> None:
        """Raise `TooManyFailures` if more than the share `max_rate` of them failed."""
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
