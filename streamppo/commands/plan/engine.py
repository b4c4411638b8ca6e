"""Simulates an engine. Steps without a change are one piece of work, which a new row or version ends."""

import bisect
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

from streamppo.commands.plan.shared_cores import SharedCores, Work
from streamppo.commands.plan.workload import StageCosts, Workload
from streamppo.types import Ticket

Ages: TypeAlias = tuple[tuple[int, int], ...]
"""(version, number of tokens that the version sampled), with the oldest version first."""


class SimulatedRow(NamedTuple):
    """A completion that began at step `begun`. A completion without a ticket answers a prompt of an evaluation."""

    ticket: Ticket | None
    length: int
    begun: int = 0


class SimulatedEngine:
    """An engine on `cores`, which calls `ended` with each complete row and its ages, and `swapped` at each swap."""

    def __init__(
        self,
        cores: SharedCores,
        workload: Workload,
        costs: StageCosts,
        ended: Callable[[SimulatedRow, Ages], None],
        swapped: Callable[[], None],
    ) -> None:
        self.version, self.busy_s = 0, 0.0
        self._cores, self._workload, self._costs = cores, workload, costs
        self._ended, self._swapped = ended, swapped
        self._newest, self._step, self._cached = 0, 0, 0.0
        self._waiting: deque[SimulatedRow] = deque()
        self._rows: list[tuple[int, int, SimulatedRow]] = []
        self._numbers = itertools.count()
        self._swaps = [(0, 0)]
        self._work: Work | None = None
        self._steps, self._before_s, self._step_s, self._began = 0, 0.0, 0.0, 0.0

    def add(self, rows: Sequence[SimulatedRow]) -> None:
        self._waiting.extend(rows)
        self._interrupt()

    def pull(self, version: int) -> None:
        """Swap to `version` after the current step."""
        self._newest = version
        self._interrupt()

    def _interrupt(self) -> None:
        """End the work after the current step."""
        if self._work is None:
            self._boundary()
            return
        spent = self._before_s + self._steps * self._step_s - self._cores.left(self._work)
        steps = 1 + int(max(0.0, spent - self._before_s) / self._step_s) if self._step_s else 1
        if steps < self._steps:
            self._steps = steps
            self._cores.shorten(self._work, max(0.0, self._before_s + steps * self._step_s - spent))

    def _boundary(self) -> None:
        costs, workload, self._before_s = self._costs, self._workload, 0.0
        if self._newest > self.version:
            self.version = self._newest
            self._swaps.append((self._step, self.version))
            self._before_s += costs.swap_s
            self._swapped()
        if admitted := min(len(self._waiting), workload.slots - len(self._rows)):
            self._before_s += costs.prefill_s + costs.prompt_s * admitted
            self._cached += workload.prompt_tokens * admitted
            for _ in range(admitted):
                row = self._waiting.popleft()._replace(begun=self._step)
                # The prefill samples the first token.
                heapq.heappush(self._rows, (self._step + row.length - 1, next(self._numbers), row))
        if not (self._rows or self._before_s):
            return
        self._steps = self._rows[0][0] - self._step if self._rows else 0
        cached = self._cached + self._steps * len(self._rows) / 2
        self._step_s = costs.step_s + costs.row_s * len(self._rows) + costs.cached_s * cached
        self._began = self._cores.now
        seconds = self._before_s + self._steps * self._step_s
        self._work = self._cores.work(seconds, self._stepped, on_core=workload.cores is not None)

    def _stepped(self) -> None:
        self._work = None
        self.busy_s += self._cores.now - self._began
        self._step += self._steps
        self._cached += self._steps * len(self._rows)
        while self._rows and self._rows[0][0] <= self._step:
            row = heapq.heappop(self._rows)[2]
            self._cached -= self._workload.prompt_tokens + row.length - 1
            self._ended(row, self._ages(row))
        self._boundary()

    def _ages(self, row: SimulatedRow) -> Ages:
        """Return the ages of a row that ends with this step. The prefill sampled the row's first token."""
        first = bisect.bisect_right(self._swaps, (row.begun, inf)) - 1
        ages, end = Counter({self._swaps[first][1]: 1}), row.begun + row.length - 1
        for (step, version), (until, _) in itertools.pairwise([*self._swaps[first:], (end, 0)]):
            ages[version] += max(0, min(until, end) - max(step, row.begun))
        return tuple(sorted((version, count) for version, count in ages.items() if count))
