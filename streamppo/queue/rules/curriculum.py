"""Skips prompts of rows whose last groups had no learning signal (GRESO, https://arxiv.org/abs/2506.02177). Pure.

    z of a row    its last groups in a row without a learning signal, among those that were trained on or resampled: of
                  samples that were all right, or, as in GRESO, all of equal score
    opening       prompt p is skipped with probability 1 - max(floor, repeat^z), by a number drawn from (seed, p)

Groups count when the version is published that their batch makes, and with it those that were resampled before. So with
`max_lag = 0` the prompts of a version follow from the batches before it. A group counts once, however often its samples
were lost or too old.
"""

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import groupby

from streamppo.config.correction import Curriculum, Resample
from streamppo.errors import QueueError
from streamppo.queue.rules.records import NO_ROWS, EndedAttempt
from streamppo.queue.rules.state import QueueSettings, QueueState
from streamppo.tasks.order import RowNumbers
from streamppo.types import Trajectory


class RowCurriculum:
    """Counts the groups of each row in `state`, and decides which prompts are skipped.

    `settings` say which groups have no learning signal. No prompt has a row until `map_rows` was called, or `state` has
    recorded the rows.
    """

    def __init__(self, chosen: Curriculum, settings: QueueSettings, state: QueueState) -> None:
        self._chosen, self._settings, self._state = chosen, settings, state
        self._row: Callable[[int], int] | None = None
        self._seed = 0
        self._are_rows_new = True
        if state.rows is not None and state.rows.numbers.sources:
            self._use(state.rows.numbers)

    def begin(self) -> None:
        """Expect the rows of a new driver, whose data may have changed."""
        self._are_rows_new = True

    def map_rows(self, rows: RowNumbers) -> None:
        """Use these rows. If they are not those of before, every count becomes 0.

        Raises `QueueError` if actors of one driver have other rows.
        """
        state = self._state
        before = NO_ROWS if state.rows is None else state.rows.numbers
        if rows != before and not self._are_rows_new:
            raise QueueError(
                f"two actors read other data, {_described(before)} and {_described(rows)}: "
                "algorithm.curriculum needs the same files on every node"
            )
        self._are_rows_new = False
        if rows == before:
            return
        if not rows.has_rows_of(before):
            state.forget_rows()
        state.know_rows(rows)
        self._use(rows)

    def skip_count(self, prompt: int) -> int:
        """Return 0 if the prompt is to be sampled, and the count of its row if it is to be skipped."""
        if self._row is None:
            raise QueueError("no actor has sent the order of its rows, which algorithm.curriculum needs")
        count = self._state.zero_variance.get(self._row(prompt), 0)
        share = max(self._chosen.floor, self._chosen.repeat**count)
        return count if count and _draw(self._seed, prompt) >= share else 0

    def judge(self, trajectories: Iterable[Trajectory]) -> None:
        """Count the resampled groups, and those among `trajectories`, in which those of a prompt are adjacent.

        Without known rows nothing is counted: the first batch of a run that goes on with a curriculum may be older.
        """
        for prompt, counts in sorted(self._state.resampled.items()):
            self._count(prompt, counts=counts)
        self._state.resampled.clear()
        for prompt, members in groupby(trajectories, key=lambda trajectory: trajectory.identity.prompt):
            group = list(members)
            is_silent = why_no_signal(group, self._settings.judged) is not None
            self._count(prompt, counts=is_silent and _counts([one.reward for one in group], self._settings))

    def note_resampled(self, group: Sequence[Trajectory]) -> None:
        """Have a group that is replaced by another prompt's count with the next version."""
        self._state.resampled[group[0].identity.prompt] = _counts([one.reward for one in group], self._settings)

    def _count(self, prompt: int, *, counts: bool) -> None:
        if self._row is not None:
            row = self._row(prompt)
            self._state.count_zero_variance(row, self._state.zero_variance.get(row, 0) + 1 if counts else 0)

    def _use(self, rows: RowNumbers) -> None:
        self._row, self._seed = rows.of_prompts(), rows.seed


def resampled(ended: Iterable[EndedAttempt], settings: QueueSettings) -> dict[int, dict[int, bool]]:
    """For each version, the prompts whose groups were resampled before the next one, and whether they count for z."""
    rewards: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for one in ended:
        if one.state == "resampled" and one.reward is not None:
            rewards[one.version, one.identity.prompt].append(one.reward)
    found: defaultdict[int, dict[int, bool]] = defaultdict(dict)
    for (version, prompt), of_group in rewards.items():
        found[version][prompt] = _counts(of_group, settings)
    return found


def _counts(rewards: Sequence[float], settings: QueueSettings) -> bool:
    """True if a group without a learning signal counts for z."""
    is_for_all = settings.curriculum is not None and settings.curriculum.skip == "equal"
    return is_for_all or min(rewards) >= settings.correct_at


def why_no_signal(group: Sequence[Trajectory], resample: Resample) -> str | None:
    """Why a group has no learning signal, or None.

    A new delivery has the component (`validation.defect`); a group that lacks it is of an earlier configuration, and
    is not judged.
    """
    name = resample.component
    if name and any(name not in trajectory.components for trajectory in group):
        return None
    values = [trajectory.components[name] if name else trajectory.reward for trajectory in group]
    what = f"values of {name!r}" if name else "rewards"
    if len(set(values)) == 1:
        return f"all {what} are {values[0]:g}"
    mean = sum(values) / len(values)
    if resample.mean and not resample.mean[0] <= mean <= resample.mean[1]:
        return f"the mean of the {what}, {mean:g}, is outside of {resample.mean[0]:g} to {resample.mean[1]:g}"
    return None


def _draw(seed: int, prompt: int) -> float:
    """A number in [0, 1) for a prompt. A hash: a generator of NumPy would take 30 times as long."""
    digest = blake2b(struct.pack("<Qq", seed % 2**64, prompt), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _described(rows: RowNumbers) -> str:
    return " and ".join(f"{source.count:,} rows of {source.name}" for source in rows.sources)
