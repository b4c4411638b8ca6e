"""The numbers of a run that rules look at, and what they tell of how far it has come. Pure: no disk, no clock."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TypeAlias

from streamppo.config.sections import Config
from streamppo.telemetry import progress
from streamppo.telemetry.metrics_file import EngineLine, EvaluationLine
from streamppo.telemetry.summary import Summary

WINDOW = 20
"""Updates that a rule looks at together."""
SOLVED = 0.8
"""A task is all but solved at this share of reward.correct_at, or of right held-out answers."""
RISEN, RISE_WINDOWS = 0.01, 3
"""The reward rises if it is so much of reward.correct_at above that of so many windows before."""

Numbers: TypeAlias = Mapping[str, float]


class Evidence(NamedTuple):
    """The numbers that rules look at.

    `recent` are the metrics of the last `WINDOW` updates, `windows` the means of every `WINDOW` updates from the first
    ones on, `evaluations` in the order of their versions, `engines` the newest line of each rollout actor. `summary` is
    there at the end of a run.
    """

    config: Config
    recent: Sequence[Numbers]
    windows: Sequence[Numbers]
    evaluations: Sequence[EvaluationLine] = ()
    summary: Summary | None = None
    engines: Sequence[EngineLine] = ()

    def series(self, name: str) -> list[float]:
        """The values of a metric in the last updates that have it."""
        return [update[name] for update in self.recent if name in update]

    def mean(self, name: str) -> float | None:
        """The mean of a metric over the last updates; None where none has it."""
        return fmean(values) if (values := self.series(name)) else None

    def share(self, part: str, whole: str) -> float:
        """The sum of one metric over that of another, in the last updates; 0 where there is nothing."""
        return sum(self.series(part)) / max(sum(self.series(whole)), 1e-9)

    @property
    def rises(self) -> bool:
        """True if the reward is above that of some windows before."""
        means = [window["reward"] for window in self.windows if "reward" in window]
        return bool(means) and means[-1] - means[-1 - RISE_WINDOWS :][0] > RISEN * self.config.reward.correct_at

    @property
    def right(self) -> float:
        """The share of right answers: of the samples by their mean reward, or of held-out prompts where it is lower.

        One evaluation may be of an unlucky version, so the better of the last two counts; one from before the last
        updates but `RISE_WINDOWS` windows tells nothing of the policy as it is.
        """
        share = self._share(self.mean("reward"))
        known = progress.evaluations_with_score(self.evaluations)[-2:]
        is_new = bool(known) and known[-1].version > WINDOW * (len(self.windows) - RISE_WINDOWS)
        return min(share, max(one.accuracy for one in known)) if is_new else share

    @property
    def left(self) -> float:
        """The share of what was wrong in the first updates that is wrong still, from 0 to 1; 0 of a solved task.

        Example: of 20% right answers to 60% halves what is left.
        """
        if self.right >= SOLVED:
            return 0.0
        first = self._share(self.windows[0].get("reward")) if self.windows else 0.0
        return min(1.0, (1.0 - self.right) / max(1.0 - first, 1e-9))

    @property
    def is_solved(self) -> bool:
        """True if nearly all answers are right."""
        accuracy = next((one["accuracy"] for one in reversed(self.evaluations)), None) or 0.0
        reward = self.mean("reward") or 0.0
        return accuracy >= SOLVED or reward >= SOLVED * self.config.reward.correct_at

    def _share(self, reward: float | None) -> float:
        """The share of right answers that a mean reward tells of, where wrong ones have 0."""
        at = self.config.reward.correct_at
        return (reward or 0.0) / at if at > 0 else float((reward or 0.0) >= at)
