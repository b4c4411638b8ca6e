"""Simulates time: timers, and work that shares the cores of a machine evenly."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

LEAST_CORES = 0.25
"""Minimum cores of the simulated stages, however busy other processes keep the machine."""


@dataclass(eq=False)
class Work:
    """Work that takes `left` more seconds on `threads` cores, or runs on a GPU until the time `ends`."""

    done: Callable[[], None]
    threads: int
    on_core: bool
    left: float = 0.0
    ends: float = 0.0


class SharedCores:
    """The clock `now`, timers, and work. `cores` is None if there are enough. Other processes use `other` cores."""

    def __init__(self, cores: float | None, other: float) -> None:
        self.now = 0.0
        self._cores = inf if cores is None else max(LEAST_CORES, cores - other)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._shared: list[Work] = []

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), call))

    def work(self, seconds: float, done: Callable[[], None], *, threads: int = 1, on_core: bool = True) -> Work:
        """Begin work that takes `seconds` if no other work shares its cores, and call `done` at its end."""
        work = Work(done, threads, on_core)
        if on_core:
            self._shared.append(work)
        self.shorten(work, seconds)
        return work

    def left(self, work: Work) -> float:
        """The seconds that the work still takes if no other work shares its cores."""
        return work.left if work.on_core else work.ends - self.now

    def shorten(self, work: Work, seconds: float) -> None:
        """Set the seconds that `left` returns."""
        if work.on_core:
            work.left = seconds
        else:
            work.ends = self.now + seconds
            self.after(seconds, partial(self._end, work, work.ends))

    def advance(self) -> None:
        """Advance the clock to the next end of a timer or of work. Raises `RuntimeError` if nothing is left."""
        busy = sum(work.threads for work in self._shared)
        rate = min(1.0, self._cores / busy) if busy else 1.0
        first = min(self._shared, key=lambda work: work.left, default=None)
        seconds = self._timers[0][0] - self.now if self._timers else inf
        if first is not None and (needs := max(0.0, first.left / rate)) < seconds:
            seconds = needs
        else:
            first = None
        if seconds == inf:
            raise RuntimeError("every stage waits for another one")
        self.now += seconds
        for work in self._shared:
            work.left -= seconds * rate
        if first is None:
            heapq.heappop(self._timers)[2]()
        else:
            self._shared.remove(first)
            first.done()

    def _end(self, work: Work, ends: float) -> None:
        """End work on a GPU unless `shorten` has changed its end."""
        if work.ends == ends:
            work.done()
