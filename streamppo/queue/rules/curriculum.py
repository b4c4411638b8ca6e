"""Skips prompts of data rows whose last groups had no learning signal (GRESO, https://arxiv.org/abs/2506.02177). Pure.

    z of a row    the number of its consecutive last groups without a learning signal: all samples right or, as in
                  GRESO, all scores equal; groups that were trained on or resampled are counted
    opening       prompt p is skipped with probability 1 - max(floor, repeat^z), by a number drawn from (seed, p)

Groups are counted when the version that trained on them is published, together with groups that were resampled since
the previous version. So with `max_lag = 0` the earlier batches determine the prompts of a batch. A group counts once,
even if samples were lost or too old and had to be sampled again.
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
    """Counts the groups of each row in `state`, and decides which prompts are skipped."""

    def __init__(self, config: Curriculum, settings: QueueSettings, state: QueueState) -> None:
        self._config, self._settings, self._state = config, settings, state
        self._row: Callable[[int], int] | None = None
        self._seed = 0
        self._are_rows_new = True
        if state.rows is not None and state.rows.numbers.sources:
            self._use(state.rows.numbers)

    def begin(self) -> None:
        """Expect new rows from a new driver, whose data may have changed."""
        self._are_rows_new = True

    def map_rows(self, rows: RowNumbers) -> None:
        """Use these rows; if they are new, every count becomes 0. Raises `QueueError` if two actors send other rows."""
        state = self._state
        before = NO_ROWS if state.rows is None else state.rows.numbers
        if rows != before and not self._are_rows_new:
            raise QueueError(
                f"two actors read different data, {_described(before)} and {_described(rows)}: "
                "algorithm.curriculum needs the same files on every node"
            )
        self._are_rows_new = False
        if rows == before:
            return
        if not rows.has_rows_of(before):
            state.forget_rows()
        state.record_rows(rows)
        self._use(rows)

    def skip_count(self, prompt: int) -> int:
        """If the prompt is to be skipped, return the count z of its row; if it is to be sampled, return 0."""
        if self._row is None:
            raise QueueError("no actor has sent the order of its rows, which algorithm.curriculum needs")
        count = self._state.zero_variance.get(self._row(prompt), 0)
        share = max(self._config.floor, self._config.repeat**count)
        return count if count and _draw(self._seed, prompt) >= share else 0

    def count_groups(self, trajectories: Iterable[Trajectory]) -> None:
        """Count the resampled groups and the groups of `trajectories`; trajectories of a prompt must be adjacent."""
        for prompt, counts in sorted(self._state.resampled.items()):
            self._count(prompt, counts=counts)
        self._state.resampled.clear()
        for prompt, members in groupby(trajectories, key=lambda trajectory: trajectory.identity.prompt):
            group = list(members)
            has_no_signal = no_signal_reason(group, self._settings.judged) is not None
            self._count(prompt, counts=has_no_signal and _counts(_rewards(group), self._settings))

    def count_resampled(self, group: Sequence[Trajectory]) -> None:
        """Record a group that another prompt's group replaces, to be counted with the next version."""
        self._state.resampled[group[0].identity.prompt] = _counts(_rewards(group), self._settings)

    def _count(self, prompt: int, *, counts: bool) -> None:
        if self._row is not None:
            row = self._row(prompt)
            self._state.count_zero_variance(row, self._state.zero_variance.get(row, 0) + 1 if counts else 0)

    def _use(self, rows: RowNumbers) -> None:
        self._row, self._seed = rows.of_prompts(), rows.seed


def resampled_prompts(ended: Iterable[EndedAttempt], settings: QueueSettings) -> dict[int, dict[int, bool]]:
    """For each version, the prompts whose groups were resampled at this version; true if the group counts for z."""
    rewards: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for attempt in ended:
        if attempt.state == "resampled" and attempt.reward is not None:
            rewards[attempt.version, attempt.identity.prompt].append(attempt.reward)
    by_version: defaultdict[int, dict[int, bool]] = defaultdict(dict)
    for (version, prompt), group_rewards in rewards.items():
        by_version[version][prompt] = _counts(group_rewards, settings)
    return by_version


def _rewards(group: Sequence[Trajectory]) -> list[float]:
    return [trajectory.reward for trajectory in group]


def _counts(rewards: Sequence[float], settings: QueueSettings) -> bool:
    """True if a group without a learning signal counts for z: with `skip = "equal"` always, else if all are right."""
    is_for_all = settings.curriculum is not None and settings.curriculum.skip == "equal"
    return is_for_all or min(rewards) >= settings.correct_at


def no_signal_reason(group: Sequence[Trajectory], resample: Resample) -> str | None:
    """The reason why a group has no learning signal; None if it has one, or lacks the component."""
    name = resample.component
    if name and any(name not in trajectory.components for trajectory in group):
        return None
    values = [trajectory.components[name] if name else trajectory.reward for trajectory in group]
    noun = f"values of {name!r}" if name else "rewards"
    if len(set(values)) == 1:
        return f"all {noun} are {values[0]:g}"
    mean = sum(values) / len(values)
    if resample.mean and not resample.mean[0] <= mean <= resample.mean[1]:
        return f"the mean of the {noun}, {mean:g}, is outside of {resample.mean[0]:g} to {resample.mean[1]:g}"
    return None


def _draw(seed: int, prompt: int) -> float:
    """Hash a prompt to a number in [0, 1). A generator of NumPy would take 30 times as long."""
    digest = blake2b(struct.pack("<Qq", seed % 2**64, prompt), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def _described(rows: RowNumbers) -> str:
    return " and ".join(f"{source.count:,} rows of {source.name}" for source in rows.sources)
