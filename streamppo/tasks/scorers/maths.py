"""Rewards for mathematics: 1 for the right final answer, else 0."""

from streamppo.tasks.scorers.answers import boxed, equal, first_number, last_number, marked
from streamppo.types import ScoredText


async def gsm8k(trajectory: ScoredText, answer: str) -> float:
    r"""GSM8K: the completion's answer is what follows its last ####, else in its last \boxed{}, else its last number.

    `answer` is a number, or GSM8K's own solution that ends in "#### 72".
    """
    text = trajectory.completion
    claimed = marked(text)
    given = (first_number(claimed) or claimed) if claimed else boxed(text) or last_number(text)
    wanted = marked(str(answer)) or str(answer)
    return float(given is not None and equal(given, wanted))


async def math(trajectory: ScoredText, answer: str) -> float:
    r"""MATH: only what stands in the completion's last \boxed{} counts. `answer` may be a solution with a \boxed{}."""
    given = boxed(trajectory.completion)
    wanted = boxed(str(answer)) or str(answer)
    return float(given is not None and equal(given, wanted))


async def numeric(trajectory: ScoredText, answer: float | str) -> float:
    r"""The last \boxed{}, else the last number, equals the answer exactly, as a number."""
    given = boxed(trajectory.completion) or last_number(trajectory.completion)
    return float(given is not None and equal(given, str(answer)))
