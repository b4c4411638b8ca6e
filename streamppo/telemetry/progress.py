"""Compares held-out accuracies, considers their noise, and states the result in a sentence. Pure.

0.398 -> 0.953: better than at the start
0.398 -> 0.000: worse than at the start; best 0.531 at version 25
0.398 -> 0.410: as at the start, within the noise of 256 prompts
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from streamppo.telemetry.metrics_file import EvaluationLine

SIGMAS = 3.0
"""Two accuracies differ if their difference exceeds this number of standard errors of the difference."""
WORSE = "worse than at the start"


class ScoredVersion(NamedTuple):
    """The accuracy of a version on `num_prompts` held-out prompts."""

    version: int
    accuracy: float
    num_prompts: int


def evaluations_with_score(evaluations: Sequence[EvaluationLine]) -> list[ScoredVersion]:
    """Return the evaluations with a score, ordered by version. The last evaluation of each version counts."""
    scored: list[ScoredVersion] = []
    for evaluation in evaluations:
        insert(scored, evaluation)
    return scored


def insert(scored: list[ScoredVersion], evaluation: EvaluationLine) -> None:
    """Insert an evaluation with a score into `scored`, ordered by version, in place of an earlier one of its version.

    Evaluations end in any order, and a resumed run repeats some of them.
    """
    version, accuracy = evaluation["evaluation"], evaluation["accuracy"]
    if accuracy is not None:
        begin = bisect_left(scored, version, key=lambda present: present.version)
        end = begin + any(present.version == version for present in scored[begin : begin + 1])
        scored[begin:end] = [ScoredVersion(version, accuracy, evaluation["count"])]


def is_below(candidate: ScoredVersion, baseline: ScoredVersion) -> bool:
    """Return whether `candidate` is less accurate than `baseline` by more than the sampling noise of the prompts.

        p     = (correct answers of both + 1) / (n + m + 2)
        noise = sqrt(p (1 - p) (1/n + 1/m))
        below = baseline.accuracy - candidate.accuracy > SIGMAS * noise

    One correct and one wrong answer are added, because n correct answers of n do not prove an accuracy of 1. Example:
    252 of 256 correct answers are within the noise of 256 of 256; 240 are not.
    """
    total = candidate.num_prompts + baseline.num_prompts
    if not total:
        return False
    num_correct = candidate.accuracy * candidate.num_prompts + baseline.accuracy * baseline.num_prompts
    p = (num_correct + 1) / (total + 2)
    noise = (p * (1 - p) * (1 / max(candidate.num_prompts, 1) + 1 / max(baseline.num_prompts, 1))) ** 0.5
    return baseline.accuracy - candidate.accuracy > SIGMAS * noise


def is_worse(evaluations: Sequence[EvaluationLine]) -> bool:
    """Return whether the last evaluation is less accurate than the first by more than the noise."""
    scored = evaluations_with_score(evaluations)
    return len(scored) > 1 and is_below(scored[-1], scored[0])


def verdict(evaluations: Sequence[EvaluationLine]) -> str:
    """Compare the last evaluation with the first and with the best; "" if there are fewer than two."""
    evaluated = evaluations_with_score(evaluations)
    if len(evaluated) < 2:
        return ""
    first, last = evaluated[0], evaluated[-1]
    best = max(evaluated, key=lambda scored: (scored.accuracy, scored.version))
    if is_below(last, first):
        change = WORSE
    elif is_below(first, last):
        change = "better than at the start"
    else:
        change = f"as at the start, within the noise of {min(first.num_prompts, last.num_prompts)} prompts"
    text = f"{first.accuracy:.3f} -> {last.accuracy:.3f}: {change}"
    return f"{text}; best {best.accuracy:.3f} at version {best.version}" if is_below(last, best) else text
