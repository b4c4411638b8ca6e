"""Counts recent restarts: too many of them end a run, because the next restart would not help either.

Actors that die together count as one restart: a dead node takes all its actors with it, and a network failure of a
minute takes the learner and every rollout actor. The second death of one actor is another restart.
"""

from collections import deque

from streamppo.config.sections import Watchdog

TOGETHER_S = 30.0
"""Nodes lost by one failure are declared dead by Ray within this many seconds of each other."""


class Restarts:
    """Counts deaths at times given by the caller. Raises nothing: `add` returns the number of restarts."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._within_s = watchdog.restarts_s
        # A death outside the window of `restarts_s` groups no other with it.
        self._together_s = min(TOGETHER_S, watchdog.restarts_s)
        self._begun: deque[float] = deque()
        self._together: set[str] = set()

    def add(self, who: str, present: float) -> int:
        """Count the death of `who` at `present` seconds. Returns the restarts within `watchdog.restarts_s`.

        Example: deaths of the learner at 0 s and of rollout 0 at 2 s are one restart; rollout 0 at 4 s is the second.
        """
        if not self._begun or present - self._begun[-1] > self._together_s or who in self._together:
            self._begun.append(present)
            self._together.clear()
        self._together.add(who)
        while present - self._begun[0] > self._within_s:
            self._begun.popleft()
        return len(self._begun)
