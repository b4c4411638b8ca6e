"""Reads the gold answers of rows. An answer that no completion can match is an error of the row, not a score of 0."""

import math
from decimal import Decimal
from fractions import Fraction
from typing import cast

from streamppo.errors import TaskError
from streamppo.tasks.scorers import answers

QUOTED = 80
"""Number of characters of an answer that an error quotes."""


def text(answer: object) -> str:
    """Return a gold answer as text. Raises `TaskError` unless it is a finite number or a nonempty text."""
    if isinstance(answer, str) and answer.strip():
        return answer
    is_number = isinstance(answer, int | float | Decimal | Fraction) and not isinstance(answer, bool)
    try:
        if is_number and math.isfinite(cast(float, answer)):
            return str(answer)
    # Python converts integers of at most 4300 digits, and floats have a smaller range.
    except (ValueError, OverflowError) as error:
        raise TaskError(f"the row's answer is a number that cannot be read: {error}") from error
    raise TaskError(f"the row's answer is {answer!r:.{QUOTED}}, which is neither a text nor a finite number")


def completion(answer: object) -> str:
    """Return a gold answer as it would stand in a completion; "" if it is neither a text nor a finite number."""
    try:
        return text(answer)
    except TaskError:
        return ""


def number(answer: object) -> Fraction:
    r"""Read a gold answer as a number: alone, after the last ####, or in the last \boxed{}. Raises `TaskError`."""
    answer_text = text(answer)
    inner = answers.extract_marked(answer_text) or answers.extract_boxed(answer_text) or answer_text
    value = answers.number(answers.extract_boxed(inner) or inner)
    if value is None:
        raise TaskError(
            f"the row's answer is {answer!r:.{QUOTED}}, which is not a number: "
            r'write the number alone, after "####", or in "\boxed{}"'
        )
    return value
