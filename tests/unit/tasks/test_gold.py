"""A gold answer that a scorer cannot read is its row's fault: the trajectory fails with the reason, and is not a 0."""

import asyncio
import inspect
import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from reward_case import one_function, started, text

from streamppo.errors import RewardFailed, TaskError
from streamppo.tasks.library import arithmetic, gym
from streamppo.tasks.library.calculator import Calculator
from streamppo.tasks.scorers import code, maths, readers
from streamppo.types import Prompt

READABLE = [
    ("46", "46"),
    (46, "46"),
    (46.0, "46"),
    (Decimal("46.0"), "46"),
    (Fraction(1, 2), "0.5"),
    ("1,234", "1234"),
    ("$46", "46"),
    ("46.", "46"),
    (r"\boxed{46}", "46"),
    ("so 40 + 6 = 46\n#### 46", "46"),
    (r"#### \boxed{46}", "46"),
    (r"we get \boxed{46}.", "46"),
    (2**80, str(2**80)),
]
UNREADABLE = [None, "", " ", True, [], ["46"], {"target": 46}, b"46", math.nan, math.inf, Decimal("NaN")]
NO_NUMBERS = ["The answer is 46.", "46 apples", "['46']", "forty-six", r"\boxed{x}", "#### about 46", "46 or 47", "-"]


def called(scorer: Callable[..., Any], completion: str, **columns: Any) -> Any:
    score = scorer(text(completion), **columns)
    return asyncio.run(score) if inspect.iscoroutine(score) else score


@pytest.mark.parametrize("scorer", [maths.gsm8k, maths.numeric])
@pytest.mark.parametrize(("answer", "given"), READABLE, ids=repr)
def test_a_number_is_read_however_a_data_set_writes_it(scorer: Callable[..., Any], answer: Any, given: str) -> None:
    assert called(scorer, f"it is {given}", answer=answer) == 1.0
    assert called(scorer, "it is 45", answer=answer) == 0.0


@pytest.mark.parametrize("scorer", [maths.gsm8k, maths.numeric])
@pytest.mark.parametrize("answer", [*UNREADABLE, *NO_NUMBERS], ids=repr)
@pytest.mark.parametrize("completion", ["46", "nothing"])
def test_an_answer_that_is_no_number_is_refused_whatever_the_completion(
    scorer: Callable[..., Any], answer: Any, completion: str
) -> None:
    with pytest.raises(TaskError, match="the row's answer is"):
        called(scorer, completion, answer=answer)


@pytest.mark.parametrize("scorer", [maths.Math(), arithmetic.score], ids=["Math", "arithmetic"])
@pytest.mark.parametrize("answer", UNREADABLE, ids=repr)
@pytest.mark.parametrize("completion", [r"\boxed{46}", "nothing"])
def test_an_answer_that_is_neither_a_text_nor_a_number_is_refused(
    scorer: Callable[..., Any], answer: Any, completion: str
) -> None:
    with pytest.raises(TaskError, match="the row's answer is"):
        called(scorer, completion, answer=answer)


def test_a_formula_that_math_verify_cannot_read_is_refused_also_without_a_box() -> None:
    for completion in ("no box", r"\boxed{1}"):
        with pytest.raises(TaskError, match="math-verify cannot read the row's answer"):
            called(maths.Math(), completion, answer=r"\boxed{}")


def test_a_number_of_too_many_digits_is_refused() -> None:
    for number in (10**5000, Fraction(10**5000), Fraction(1, 10**5000)):
        with pytest.raises(TaskError, match="the row's answer is"):
            called(maths.numeric, "1", answer=number)


def test_a_sum_given_as_a_number_is_its_text() -> None:
    assert [called(arithmetic.score, given, answer=46) for given in ("46", "47")] == [1.0, 0.0]


PAIRS = [{"input": "1\n2", "output": "3\n"}, {"input": "4", "output": "5"}]
PUBLISHED: dict[str, Any] = {
    "APPS, TACO and PRIME": {"inputs": ["1\n2", "4"], "outputs": ["3\n", "5"]},
    "TACO, by lines": {"inputs": [["1", "2"], ["4"]], "outputs": [["3", ""], "5"]},
    "code_contests": {"input": ["1\n2", "4"], "output": ["3\n", "5"], "fn_name": None},
    "LiveCodeBench": [{**pair, "testtype": "stdin"} for pair in PAIRS],
}


@pytest.mark.parametrize("form", [lambda tests: tests, json.dumps], ids=["values", "json"])
@pytest.mark.parametrize("published", PUBLISHED)
def test_tests_are_read_as_data_sets_publish_them(published: str, form: Callable[[Any], Any]) -> None:
    read = code.read_tests(form(PUBLISHED[published]))
    assert [{"input": test["input"], "output": test["output"]} for test in read if isinstance(test, dict)] == PAIRS


def test_the_check_of_human_eval_is_called_with_the_entry_point_of_its_row() -> None:
    check = "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
    (test,) = code.read_tests(check, "add_one")
    assert isinstance(test, str) and test.startswith(check) and test.endswith("\ncheck(add_one)\n")
    for tests, entry_point in ((check, None), (check, ""), (check, "f(1)"), ("assert f(1)", "f")):
        with pytest.raises(TaskError, match=r"defines check\(candidate\) and has a column entry_point"):
            code.read_tests(tests, entry_point)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f"}, "call the function 'f' .*: write them as code, such as"),
        ({"inputs": ["1"], "outputs": []}, "`tests` have 1 inputs and 0 outputs"),
        ({"inputs": [[1]], "outputs": ["1"]}, "has the texts `input` and `output`; this is"),
        ({"inputs": [], "outputs": []}, "must be a list that is not empty"),
    ],
)
def test_pairs_that_are_no_texts_are_refused(tests: Any, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        code.read_tests(tests)


@pytest.mark.parametrize("tests", [None, "", "[]", "null", "not json", "{}", [], [1], [{"input": "1"}], '["x", 1]', 7])
def test_a_row_without_usable_tests_is_refused(tests: Any) -> None:
    with pytest.raises(TaskError, match="test"):
        code.read_tests(tests)


def test_the_calculator_refuses_a_problem_without_an_answer() -> None:
    for columns in ({}, {"answer": None}):
        with pytest.raises(TaskError, match="the row's answer is None"):
            asyncio.run(Calculator().reset(Prompt(text="1+2=", columns=columns)))


@pytest.mark.parametrize("function", ["maths:gsm8k", "maths:numeric", "maths:Math"])
@pytest.mark.parametrize("completion", ["46", r"\boxed{46}"])
def test_a_run_fails_the_trajectory_of_such_a_row_with_the_reason(function: str, completion: str) -> None:
    async def story() -> None:
        async with started(one_function(function=f"streamppo.tasks.scorers.{function}", processes=1)) as rewards:
            with pytest.raises(RewardFailed, match=r"the row's answer is \['46'\]"):
                await rewards.score(Prompt(text="40+6=", columns={"answer": ["46"]}), text(completion))

    asyncio.run(story())


def test_a_reader_refuses_what_its_scorer_refuses() -> None:
    bad = {"answer": None, "tests": "[]", "entry": "datetime.date(2020, 1, 1)"}
    good = {"answer": "46", "tests": ["assert f() == 1"], "entry": "{'answer': '46'}"}
    assert set(readers.READERS) >= {
        f"{one.__module__}:{one.__qualname__}"
        for one in (maths.gsm8k, maths.numeric, maths.Math, code.CodeTests, arithmetic.score, gym.score)
    }
    for function in readers.READERS:
        read = readers.READERS.get(function)
        assert read is not None
        assert read(good)
        with pytest.raises(TaskError):
            read(bad)
    assert readers.READERS.get("mine.py:score") is None
