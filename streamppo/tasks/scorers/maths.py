r"""Scores final answers in mathematics: 1 for a correct one, else 0.

gsm8k, numeric   numbers, compared exactly; async, in the actor
Math             formulas, sets, intervals, matrices, compared by math-verify; sync, so in killable processes, because
                 only a kill ends the evaluation of a policy's \boxed{9^{9^{9^9}}}
"""

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from streamppo.errors import TaskError
from streamppo.tasks.scorers import answers, gold
from streamppo.types import ScoredText

if TYPE_CHECKING:
    from sympy import Basic, MatrixBase

Expressions: TypeAlias = "list[Basic | MatrixBase | str]"
"""An answer parsed by math-verify: its formulas and its text."""
REMEMBERED = 1024
"""Number of rows whose parsed answers are cached, for all completions of a prompt."""


async def gsm8k(trajectory: ScoredText, answer: str | float) -> float:
    r"""Compare `answer` with the number after the completion's last ####, in its last \boxed{}, or else its last one.

    `answer` is a number, a GSM8K solution that ends in "#### 72", or a solution with \boxed{72}. Raises `TaskError` for
    an answer without a number.
    """
    expected = gold.number(answer)
    text = trajectory.completion
    claimed = answers.extract_marked(text)
    if claimed:
        claim = answers.first_number(claimed) or claimed
    else:
        claim = answers.extract_boxed(text) or answers.last_number(text)
    return float(claim is not None and answers.number(claim) == expected)


async def numeric(trajectory: ScoredText, answer: str | float) -> float:
    r"""Compare the number in the completion's last \boxed{}, else its last number. `answer` is read as in `gsm8k`."""
    expected = gold.number(answer)
    claim = answers.extract_boxed(trajectory.completion) or answers.last_number(trajectory.completion)
    return float(claim is not None and answers.number(claim) == expected)


class Math:
    r"""Compare the content of the completion's last \boxed{} with `answer`, by math-verify.

    `answer` is LaTeX, or a solution with a \boxed{}. Without `boxed_only`, math-verify's rules extract the answer of a
    completion without a box. Raises `TaskError` for an answer that math-verify cannot read.
    """

    def __init__(self, boxed_only: bool = True) -> None:
        # The import takes 0.5 s, so it is done only if needed, and in the template, before processes are forked.
        import math_verify

        # math-verify warns that its timeouts (by SIGALRM) are off. They are not needed: our timeout kills the process.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._library = math_verify
        self._boxed_only = boxed_only
        self._parse_cached = lru_cache(maxsize=REMEMBERED)(self._parse_bare)

    def __call__(self, trajectory: ScoredText, answer: str | float) -> float:
        expected_text, expected = self.read_answer(answer)
        inside = answers.extract_boxed(trajectory.completion)
        if inside is None and self._boxed_only:
            return 0.0
        if inside is not None and answers.same_number(inside, expected_text):
            return 1.0
        claim = self._parse(trajectory.completion) if inside is None else self._parse_bare(inside)
        return float(self._library.verify(expected, claim, timeout_seconds=None))

    def read_answer(self, answer: object) -> tuple[str, Expressions]:
        """Read a row's answer: its text, and its formulas. Raises `TaskError` if math-verify cannot read the answer."""
        text = gold.text(answer)
        inner = answers.extract_boxed(text) or text
        expressions = self._parse_cached(inner)
        if not expressions:
            raise TaskError(f"math-verify cannot read the row's answer {answer!r:.{gold.QUOTED}}")
        return inner, expressions

    def _parse_bare(self, latex: str) -> Expressions:
        # math-verify reads LaTeX only inside dollars or boxes.
        return self._parse(f"\\boxed{{{latex}}}")

    def _parse(self, text: str) -> Expressions:
        # The signature of `parse` lacks the None that its documentation allows.
        return self._library.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
