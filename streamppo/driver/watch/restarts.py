"""Restarts of late: too many of them end a run, for what is started again and again is not going to live.

Actors that die together count once, however many they are: a node dies with all that is on it, and a network that fails
for a minute takes the learner and every rollout actor at one time. An actor that dies again is another restart.
"""

from collections import deque

from streamppo.config.sections import Watchdog

TOGETHER_S = 30.0
"""Ray gives up the nodes that one failure has cut off within so many seconds of each other."""


class Restarts:
    """Counts what has died; the caller tells the time. Raises nothing: `add` returns how many restarts count."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._within_s = watchdog.restarts_s
        # A death that is out of sight has nobody together with it.
        self._together_s = min(TOGETHER_S, watchdog.restarts_s)
        self._begun: deque[float] = deque()
        self._together: set[str] = set()

    def add(self, who: str, present: float) -> int:
        """Count the death of `who`. Returns the restarts within `watchdog.restarts_s`.

        The learner's at 0 s and that of rollout 0 at 2 s are one; that of rollout 0 at 4 s is the second.
        """
        if not self._begun or present - self._begun[-1] > self._together_s or who in self._together:
            self._begun.append(present)
            self._together.clear()
        self._together.add(who)
        while present - self._begun[0] > self._within_s:
            self._begun.popleft()
        return len(self._begun)
