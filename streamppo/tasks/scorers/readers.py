r"""Readers of rows: each reads a row's columns as one of our scorers does, or raises `TaskError`.

gsm8k, numeric     a number: alone, after the last ####, or in the last \boxed{}
Math               a formula that math-verify can read, alone or in the last \boxed{}
CodeTests          a list of tests, also as JSON
arithmetic, gym    a text or a number; a problem as a Python literal
"""

import ast
from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeAlias

from streamppo.errors import TaskError
from streamppo.tasks.dataset_files import Row
from streamppo.tasks.scorers import code, gold
from streamppo.tasks.scorers.maths import Math

Reader: TypeAlias = Callable[[Row], object]


@cache
def _math() -> Math:
    return Math()


def _problem(row: Row) -> object:
    entry = str(row.get("entry"))
    try:
        return ast.literal_eval(entry)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise TaskError(f"the problem {entry[: gold.QUOTED]!r} is not written in Python's notation") from error


READERS: Mapping[str, Reader] = {
    "streamppo.tasks.scorers.maths:gsm8k": lambda row: gold.number(row.get("answer")),
    "streamppo.tasks.scorers.maths:numeric": lambda row: gold.number(row.get("answer")),
    "streamppo.tasks.scorers.maths:Math": lambda row: _math().read_answer(row.get("answer")),
    "streamppo.tasks.scorers.code:CodeTests": lambda row: code.read_tests(row.get("tests"), row.get("entry_point")),
    "streamppo.tasks.library.arithmetic:score": lambda row: gold.text(row.get("answer")),
    "streamppo.tasks.library.gym:score": _problem,
}
"""The reader of each scorer. A scorer is left out if the form of its rows is unknown."""
