"""The built-in scorers: right answers however they are written, forms, lengths, programs."""

import asyncio
import time
from typing import Any

import psutil
import pytest

from streamppo.errors import TaskError
from streamppo.tasks.scorers import answers, maths, shape
from streamppo.tasks.scorers.code import CodeTests, program_of
from streamppo.tasks.scorers.sandbox import Local
from streamppo.types import Reward, ScoredText


def text(completion: str, finish: str = "stop", num_tokens: int = 1) -> ScoredText:
    return ScoredText(prompt="", completion=completion, finish=finish, num_tokens=num_tokens)  # pyright: ignore


# --- mathematics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} and then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{never closed", None),
        ("nothing", None),
    ],
)
def test_the_last_box_is_found_with_its_braces_balanced(completion: str, found: str | None) -> None:
    assert answers.boxed(completion) == found


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("72", "72.0"),
        ("1,234", "1234"),
        ("$3.50", "3.5"),
        (r"\frac{3}{4}", "0.75"),
        (r"\dfrac34", "3/4"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        (r"\text{Evelyn}", "evelyn"),
        ("x + 1", "x+1"),
        ("5 inches", "5"),
        (r"\left( 1, 2 \right)", "(1,2)"),
    ],
)
def test_one_answer_in_two_spellings_is_equal(given: str, wanted: str) -> None:
    assert answers.equal(given, wanted)


@pytest.mark.parametrize(("given", "wanted"), [("72", "73"), ("x+1", "x-1"), ("", "0"), ("1/0", "0"), ("0.33", "1/3")])
def test_different_answers_are_not(given: str, wanted: str) -> None:
    assert not answers.equal(given, wanted)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("48/2 = 24, and 48+24 = 72\n#### 72", 1),
        ("The answer is 72.", 1),
        (r"thus \boxed{72}", 1),
        ("#### $72.00", 1),
        ("72 or 73", 0),
        ("#### 71, no: 72", 0),
        ("seventy-two", 0),
    ],
)
def test_gsm8k_takes_the_marked_answer_or_the_last_number(completion: str, score: int) -> None:
    assert asyncio.run(maths.gsm8k(text(completion), "Natalia sold 48/2 = 24.\n#### 72")) == score
    assert asyncio.run(maths.gsm8k(text(completion), "72")) == score


def test_math_counts_the_box_alone() -> None:
    assert asyncio.run(maths.math(text(r"\boxed{\frac{1}{2}}"), r"We get $\boxed{0.5}$.")) == 1
    assert asyncio.run(maths.math(text("0.5"), "0.5")) == 0
    assert asyncio.run(maths.numeric(text("about 0.5"), 0.5)) == 1


def test_math_verify_knows_symbolic_equality_away_from_the_main_thread() -> None:
    pytest.importorskip("math_verify")
    from concurrent.futures import ThreadPoolExecutor

    from streamppo.tasks.scorers.mathverify import MathVerify

    with ThreadPoolExecutor(1) as other:
        scores = [
            other.submit(MathVerify(), text(completion), answer).result()
            for completion, answer in (
                (r"\boxed{\frac{x}{2}}", "0.5x"),
                (r"so $\{1,2\}$", r"\{2,1\}"),
                (r"\boxed{3}", "4"),
            )
        ]
    assert scores == [1.0, 1.0, 0.0]


# --- form ----------------------------------------------------------------------------------------------------


def test_patterns_match_whole_completions_over_lines() -> None:
    wanted = shape.Pattern(r"<a>.*</a>")
    assert (wanted(text("<a>1\n2</a>")), wanted(text("x<a></a>"))) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a<answer>b</answer>", 0),
    ],
)
def test_think_and_answer_stand_once_and_in_order(completion: str, score: int) -> None:
    assert asyncio.run(shape.think_answer(text(completion))) == score


def test_overlong_is_dapos_equation() -> None:
    overlong = shape.Overlong(max_tokens=100, margin=20)
    lengths = {1: 0.0, 80: 0.0, 85: -0.25, 90: -0.5, 100: -1.0, 120: -1.0}
    assert {n: asyncio.run(overlong(text("", num_tokens=n))) for n in lengths} == lengths
    assert asyncio.run(overlong(text("", "length", 1))) == -1.0
    with pytest.raises(ValueError, match="margin"):
        shape.Overlong(max_tokens=10, margin=20)


# --- programs ------------------------------------------------------------------------------------------------

ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


def run_tests(completion: str, tests: Any, **how: Any) -> Reward:
    async def story() -> Reward:
        return await CodeTests(**how)(text(completion), tests)

    return asyncio.run(story())


def test_the_score_is_the_share_of_tests_that_pass() -> None:
    found = run_tests(ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"])
    assert (found.score, found.components) == (0.5, {"passed": 0.5})
    assert found.explanation.startswith("test 2: exit code 1:") and "AssertionError" in found.explanation
    assert run_tests(ADD, '["assert add(1, 2) == 3", "assert 0"]', all_or_nothing=True).score == 0.0


def test_standard_input_and_output_are_compared() -> None:
    echo = "print(int(input()) * 2)"
    found = run_tests(echo, [{"input": "4", "output": "8\n"}, {"input": "4", "output": "9"}])
    assert found.score == 0.5
    assert "printed '8\\n' instead of '9'" in found.explanation


@pytest.mark.parametrize("leave", ["import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)"])
def test_a_program_that_leaves_before_its_test_has_not_passed(leave: str) -> None:
    assert run_tests(leave, ["assert add(1, 2) == 3"]).explanation == "test 1: it ended before its test"


def test_a_program_that_runs_on_is_killed_with_all_that_it_has_started() -> None:
    program = "import subprocess\nsubprocess.Popen(['sleep', '987'])\nwhile True: pass"
    begin = time.perf_counter()
    assert run_tests(program, [""], test_timeout_s=0.5).explanation == "test 1: no end after 0.5 s"
    assert time.perf_counter() - begin < 30.0
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987"]]


def test_a_child_that_holds_the_output_open_does_not_hold_the_reward() -> None:
    program = "import subprocess\nsubprocess.Popen(['sleep', '986'])"
    begin = time.perf_counter()
    assert run_tests(program, [""], test_timeout_s=30.0).score == 1.0
    assert time.perf_counter() - begin < 25.0


def test_memory_and_output_are_bounded() -> None:
    assert "MemoryError" in run_tests("x = bytearray(2**30)", [""]).explanation
    ran = asyncio.run(Local(output_bytes=1000).run("print('x' * 10**7)", "", 10.0))
    assert (ran.exit_code, len(ran.stdout)) == (0, 1000)


def test_there_is_no_network_where_the_kernel_allows_it() -> None:
    connect = "socket.create_connection(('127.0.0.1', 9), 1)"
    program = f"import socket\ntry:\n    {connect}\nexcept OSError as e:\n    print(e.errno)"
    ran = asyncio.run(Local(require_no_network=True).run(program, "", 10.0))
    if "no network namespace" in ran.stderr:
        pytest.skip("this kernel allows no network namespace")
    assert ran.stdout == "101\n", "the loopback interface answers: this is the machine's own network"


def test_rows_without_usable_tests_are_errors() -> None:
    for wrong in ([], "{}", [1]):
        with pytest.raises(TaskError):
            run_tests(ADD, wrong)


def test_the_last_block_is_the_program() -> None:
    assert program_of("```python\na\n```\n```\nb\n```") == "b\n"
    assert program_of("print(1)") == "print(1)"
