"""The numbers of a run that the rules check, and measures of its progress. Pure: no disk, no clock."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TypeAlias

from streamppo.config.sections import Config
from streamppo.telemetry import attempts
from streamppo.telemetry.metrics_file import EngineLine, EvaluationLine
from streamppo.telemetry.progress import ScoredVersion
from streamppo.telemetry.summary import Summary

WINDOW = 20
SOLVED = 0.8
"""A task is nearly solved at this share of reward.correct_at, or at this held-out accuracy."""
RISEN, RISE_WINDOWS = 0.01, 3
"""The reward rises if it gained more than this share of reward.correct_at over the last `RISE_WINDOWS` windows."""

Numbers: TypeAlias = Mapping[str, float]


class Evidence(NamedTuple):
    """The numbers that rules check.

    `recent` are the metrics of the last `WINDOW` updates. `windows` are the means of each block of `WINDOW` updates
    since the first. `scored` are the evaluations with a score, ordered by version, and `evaluation` is the one of the
    newest version, with or without a score. `engines` are the newest lines of the rollout actors. `summary` is set at
    the end of a run.
    """

    config: Config
    recent: Sequence[Numbers]
    windows: Sequence[Numbers]
    scored: Sequence[ScoredVersion] = ()
    evaluation: EvaluationLine | None = None
    summary: Summary | None = None
    engines: Sequence[EngineLine] = ()

    def series(self, name: str) -> list[float]:
        return [update[name] for update in self.recent if name in update]

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over the recent updates; None if no recent update has the metric."""
        return fmean(values) if (values := self.series(name)) else None

    def failures_by_length(self) -> str | None:
        """Describe how failures depend on the length of a completion; None if the dependence is not significant."""
        table = self.summary and self.summary.get("attempts")
        return attempts.dependence(table["length_test"]) if table else None

    def share(self, part: str, whole: str) -> float:
        """Return sum(part) / sum(whole) over the recent updates; 0 if no update has `part`."""
        return sum(self.series(part)) / max(sum(self.series(whole)), 1e-9)

    @property
    def rises(self) -> bool:
        """Whether the mean reward of the newest window is above that of `RISE_WINDOWS` windows earlier."""
        means = [window["reward"] for window in self.windows if "reward" in window]
        return bool(means) and means[-1] - means[-1 - RISE_WINDOWS :][0] > RISEN * self.config.reward.correct_at

    @property
    def correct_share(self) -> float:
        """The share of correct answers: the smaller of the samples' mean reward and the held-out accuracy.

        A single version may be unlucky, so the better of the last two evaluations counts. Evaluations older than about
        `RISE_WINDOWS` windows are ignored, because they are of another policy.
        """
        share = self._share(self.mean("reward"))
        scored = self.scored[-2:]
        is_new = bool(scored) and scored[-1].version > WINDOW * (len(self.windows) - RISE_WINDOWS)
        return min(share, max(evaluation.accuracy for evaluation in scored)) if is_new else share

    @property
    def remaining_errors(self) -> float:
        """(1 - correct share) / (1 - correct share of the first window), at most 1; 0 for a nearly solved task."""
        if self.correct_share >= SOLVED:
            return 0.0
        first = self._share(self.windows[0].get("reward")) if self.windows else 0.0
        return min(1.0, (1.0 - self.correct_share) / max(1.0 - first, 1e-9))

    @property
    def is_solved(self) -> bool:
        accuracy = (self.evaluation and self.evaluation["accuracy"]) or 0.0
        reward = self.mean("reward") or 0.0
        return accuracy >= SOLVED or reward >= SOLVED * self.config.reward.correct_at

    def _share(self, reward: float | None) -> float:
        """Return the share of correct answers that gives the mean reward `reward` if wrong answers get 0."""
        at = self.config.reward.correct_at
        return (reward or 0.0) / at if at > 0 else float((reward or 0.0) >= at)
