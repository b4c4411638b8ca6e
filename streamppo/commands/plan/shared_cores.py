"""Simulated time: timers, and work that shares the cores of a machine evenly.

Example: three pieces of work on two cores each make 2/3 of a second's progress in a second.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

LEAST_CORES = 0.25
"""What is left of the cores at least, however busy other processes are."""


@dataclass(eq=False)
class Work:
    """Work on `threads` cores of the machine with `left` seconds to do, or elsewhere, where it ends at `ends`."""

    done: Callable[[], None]
    threads: int
    on_core: bool
    left: float = 0.0
    ends: float = 0.0


class SharedCores:
    """The clock `now`, timers, and work. Without a number of `cores` there are enough; `other` are always busy."""

    def __init__(self, cores: float | None, other: float) -> None:
        self.now = 0.0
        self._cores = inf if cores is None else max(LEAST_CORES, cores - other)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._shared: list[Work] = []

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` after a wait."""
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), call))

    def work(self, seconds: float, done: Callable[[], None], *, threads: int = 1, on_core: bool = True) -> Work:
        """Begin work that takes `seconds` if nothing else runs; `done` is called at its end."""
        work = Work(done, threads, on_core)
        if on_core:
            self._shared.append(work)
        self.shorten(work, seconds)
        return work

    def left(self, work: Work) -> float:
        """The seconds that work under way still takes if nothing else runs."""
        return work.left if work.on_core else work.ends - self.now

    def shorten(self, work: Work, seconds: float) -> None:
        """Let work under way have `seconds` left."""
        if work.on_core:
            work.left = seconds
        else:
            work.ends = self.now + seconds
            self.after(seconds, partial(self._end, work, work.ends))

    def advance(self) -> None:
        """Go to the next end of a wait or of work. Raises `RuntimeError` if there is none."""
        busy = sum(work.threads for work in self._shared)
        rate = min(1.0, self._cores / busy) if busy else 1.0
        first = min(self._shared, key=lambda work: work.left, default=None)
        seconds = self._timers[0][0] - self.now if self._timers else inf
        if first is not None and (needs := max(0.0, first.left / rate)) < seconds:
            seconds = needs
        else:
            first = None
        if seconds == inf:
            raise RuntimeError("everybody waits for somebody else")
        self.now += seconds
        for work in self._shared:
            work.left -= seconds * rate
        if first is None:
            heapq.heappop(self._timers)[2]()
        else:
            self._shared.remove(first)
            first.done()

    def _end(self, work: Work, ends: float) -> None:
        """End work elsewhere, unless it was shortened since."""
        if work.ends == ends:
            work.done()
