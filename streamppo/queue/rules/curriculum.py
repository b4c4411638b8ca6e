"""Skips prompts of rows whose last groups had no learning signal (GRESO, https://arxiv.org/abs/2506.02177). Pure.

    z of a row    its groups without a learning signal in a row, among those that were trained on or resampled
    opening       prompt p is skipped with probability 1 - max(floor, repeat^z), by a number drawn from (seed, p)

A batch counts when its version is published: with `max_lag = 0` the prompts of a version follow from the batches before
it. Samples lost or too old count once, because their group is trained on once.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np

from streamppo.config.correction import Curriculum, Resample
from streamppo.errors import QueueError
from streamppo.queue.rules.state import QueueState
from streamppo.tasks.order import RowNumbers
from streamppo.types import Trajectory

KEY = 0x6E50
"""Separates the draws of skips from other draws of the run's seed."""


class RowCurriculum:
    """Counts the groups of each row in `state`, and decides which prompts are skipped.

    `resample` decides which groups have no learning signal. No prompt has a row until `map_rows` was called, or `state`
    has recorded the rows.
    """

    def __init__(self, chosen: Curriculum, resample: Resample, state: QueueState) -> None:
        self._chosen, self._resample, self._state = chosen, resample, state
        self._row: Callable[[int], int] | None = None
        self._seed = 0
        self._is_new_driver = False
        if state.rows is not None:
            self._use(state.rows)

    def begin(self) -> None:
        """Expect the rows of a new driver, whose data may have changed."""
        self._is_new_driver = True

    def map_rows(self, rows: RowNumbers) -> None:
        """Use these rows. Other rows than before set every count to 0.

        Raises `QueueError` if two actors of one driver have other rows.
        """
        state = self._state
        if state.rows is not None and rows != state.rows:
            if not self._is_new_driver:
                raise QueueError(
                    f"two actors read other data, {_described(state.rows)} and {_described(rows)}: "
                    "algorithm.curriculum needs the same files on every node"
                )
            for row in [*state.zero_variance]:
                state.count_zero_variance(row, 0)
        if rows != state.rows:
            state.rows = state.pending_changes.rows = rows
            self._use(rows)
        self._is_new_driver = False

    def skip_count(self, prompt: int) -> int:
        """Return 0 if the prompt is to be sampled, and the count of its row if it is to be skipped."""
        count = self._state.zero_variance.get(self._row_of(prompt), 0)
        share = max(self._chosen.floor, self._chosen.repeat**count)
        is_drawn = share == 1.0 or np.random.default_rng((self._seed, KEY, prompt)).random() < share
        return 0 if is_drawn else count

    def judge(self, trajectories: Iterable[Trajectory]) -> None:
        """Count the groups among `trajectories`, in which those of a prompt are adjacent."""
        for prompt, members in groupby(trajectories, key=lambda trajectory: trajectory.identity.prompt):
            self.count(prompt, has_signal=why_no_signal(list(members), self._resample) is None)

    def count(self, prompt: int, *, has_signal: bool) -> None:
        """Count a group of this prompt."""
        row = self._row_of(prompt)
        self._state.count_zero_variance(row, 0 if has_signal else self._state.zero_variance.get(row, 0) + 1)

    def _use(self, rows: RowNumbers) -> None:
        self._row, self._seed = rows.of_prompts(), rows.seed

    def _row_of(self, prompt: int) -> int:
        if self._row is None:
            raise QueueError("no actor has sent the order of its rows, which algorithm.curriculum needs")
        return self._row(prompt)


def why_no_signal(group: Sequence[Trajectory], resample: Resample) -> str | None:
    """Why a group has no learning signal, or None. `validation.defect` ensures that every reward has the component."""
    name = resample.component
    values = [trajectory.components[name] if name else trajectory.reward for trajectory in group]
    what = f"values of {name!r}" if name else "rewards"
    if len(set(values)) == 1:
        return f"all {what} are {values[0]:g}"
    mean = sum(values) / len(values)
    if resample.mean and not resample.mean[0] <= mean <= resample.mean[1]:
        return f"the mean of the {what}, {mean:g}, is outside of {resample.mean[0]:g} to {resample.mean[1]:g}"
    return None


def _described(rows: RowNumbers) -> str:
    return " and ".join(f"{source.count:,} rows of {source.name}" for source in rows.sources)
