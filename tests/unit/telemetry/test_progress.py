"""A verdict compares the last evaluation with the first and with the best, and knows their noise."""

from typing import cast

import pytest

from streamppo.telemetry import progress
from streamppo.telemetry.metrics_file import EvaluationLine


def evaluations(*accuracies: float | None, count: int = 256) -> list[EvaluationLine]:
    lines = [{"evaluation": 25 * n, "accuracy": one, "count": count} for n, one in enumerate(accuracies)]
    return cast("list[EvaluationLine]", lines)


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ((0.398, 0.953), "0.398 -> 0.953: better than at the start"),
        ((0.398, 0.531, 0.0), "0.398 -> 0.000: worse than at the start; best 0.531 at version 25"),
        ((0.398, 0.0), "0.398 -> 0.000: worse than at the start; best 0.398 at version 0"),
        ((0.4, 0.9, 0.65), "0.400 -> 0.650: better than at the start; best 0.900 at version 25"),
        ((0.4, 0.9, 0.89), "0.400 -> 0.890: better than at the start"),
        ((0.4, 0.41), "0.400 -> 0.410: as at the start, within the noise of 256 prompts"),
        ((1.0, 0.988), "1.000 -> 0.988: as at the start, within the noise of 256 prompts"),
        ((0.0, 0.0), "0.000 -> 0.000: as at the start, within the noise of 256 prompts"),
        ((None, 0.4, None, 0.0), "0.400 -> 0.000: worse than at the start; best 0.400 at version 25"),
        ((0.4,), ""),
        ((None, None), ""),
        ((), ""),
    ],
)
def test_a_verdict_is_a_sentence_with_its_numbers(accuracies: tuple[float | None, ...], said: str) -> None:
    assert progress.verdict(evaluations(*accuracies)) == said
    assert progress.is_worse(evaluations(*accuracies)) == ("worse" in said)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1)])
def test_evaluations_are_ordered_by_version_and_the_last_of_each_version_counts(order: tuple[int, ...]) -> None:
    lines = evaluations(0.1, 0.2, 0.3, None)
    repeated = cast("list[EvaluationLine]", [{"evaluation": 25, "accuracy": 0.5, "count": 256}])
    scored = progress.evaluations_with_score([*(lines[place] for place in order), *repeated])
    assert [(one.version, one.accuracy) for one in scored] == [(0, 0.1), (25, 0.5), (50, 0.3)]


@pytest.mark.parametrize(("count", "is_below"), [(0, False), (1, False), (16, False), (1000, True)])
def test_few_prompts_are_noise(count: int, is_below: bool) -> None:
    one, other = progress.ScoredVersion(20, 0.5, count), progress.ScoredVersion(0, 0.7, count)
    assert progress.is_below(one, other) == is_below
    assert not progress.is_below(other, one)


def test_the_last_of_two_evaluations_of_a_version_counts() -> None:
    lines = [*evaluations(0.5, 0.1), *evaluations(0.5, 0.9)]
    assert progress.verdict(lines) == "0.500 -> 0.900: better than at the start"
