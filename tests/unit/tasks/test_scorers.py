"""The built-in scorers: right answers in every spelling, forms, lengths, programs."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest
from config_case import one_function

from streamppo.config.reward import FunctionScorer
from streamppo.config.reward import Reward as RewardConfig
from streamppo.errors import TaskError
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.scorers import answers, format_reward, maths
from streamppo.tasks.scorers.capture import LAUNCHER
from streamppo.tasks.scorers.code import CodeTests, extract_program
from streamppo.tasks.scorers.launcher import FILE_BYTES
from streamppo.tasks.scorers.sandbox import Local, Ran, RunLimits
from streamppo.types import Prompt, Reward, ScoredText


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
    assert answers.extract_boxed(completion) == found


MATH = maths.Math()


def graded(given: str, wanted: str) -> float:
    return MATH(text(rf"so \boxed{{{given}}}"), wanted)


@pytest.mark.sampled(33)
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
        # numbers
        ("1,234,567.50", "1234567.5"),
        (r"10,\!000", "10000"),
        (r"10\,000", "10 000"),
        ("1{,}000", "1000"),
        ("1e-05", "0.00001"),
        ("+.5", "0.5"),
        (str(2**200), f"{2**200}.0"),
        (r"2\frac{1}{2}", "2.5"),
        (r"-2\frac12", r"-\frac{5}{2}"),
        (r"11\frac{1}{2} \text{ inches}", "11.5"),
        # fractions as LaTeX and as people type them
        (r"\frac{2 \pi r}{3}", r"2\pi r / 3"),
        (r"\frac{x+1}{2}", "(x + 1)/2"),
        (r"\frac{1}{2x}", "1/(2x)"),
        (r"\frac{1}{x^2}", "1/x^{2}"),
        (r"\frac{-x}{2}", r"-\frac{x}{2}"),
        (r"x\ge\frac12", r"x \ge 1/2"),
        (r"(\frac12, \frac{-1}{3})", "(1/2,-1/3)"),
        (r"\dfrac{\sqrt{3}}{2}", r"\sqrt3/2"),
        (r"\frac{\frac{1}{2}}{x}", "1/2/x"),
        (r"\sin\frac{x}{2}", r"\sin(x/2)"),
        (r"\frac{a}{b}^2", r"\left(\frac{a}{b}\right)^2"),
        (r"\frac{x}{2}", "0.5x"),
        (r"(x+1)^2", "x^2 + 2x + 1"),
        # sets, matrices, names
        (r"\{1, 2\}", r"\{2, 1\}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"x = \frac{1}{2}", "0.5"),
    ],
)
def test_one_answer_in_two_spellings_is_equal(given: str, wanted: str) -> None:
    assert (graded(given, wanted), graded(wanted, given)) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("72", "73"),
        ("x+1", "x-1"),
        ("1/0", "0"),
        ("0.33", "1/3"),
        ("[0, 1)", "(0, 1]"),
        # lists are not numbers
        ("12", "1,2"),
        ("123", "1,2,3"),
        ("1234", "1, 234"),
        ("12345", "12,345,"),
        ("12", "1 2"),
        # mixed numbers
        ("10.5", r"2\frac{1}{2}"),
        ("21/2", "2 1/2"),
        ("-1.5", r"-2\frac12"),
        # where a fraction begins and ends
        (r"x+\frac12", r"\frac{x+1}{2}"),
        (r"-\frac{x+1}{2}", r"\frac{-x+1}{2}"),
        (r"\frac{1}{2}x", r"\frac{1}{2x}"),
        (r"\frac12x", r"\frac1{2x}"),
        (r"\frac{1}{x}+1", r"\frac{1}{x+1}"),
        (r"\frac{1}{2}3", r"\frac{1}{23}"),
        (r"x^2\frac{1}{2}", r"\frac{x^21}{2}"),
        (r"2\frac{-1}{3}", r"2-\frac{1}{3}"),
        (r"2^\frac{n}{2}", r"\frac{2^n}{2}"),
        (r"\sin\frac{x}{2}", r"\frac{\sin x}{2}"),
        (r"\sin^2\frac{x}{2}", r"\frac{\sin^2 x}{2}"),
        (r"\frac{a}{b}^2", r"\frac{a}{b^2}"),
        (r"\frac{1}{\frac{2}{x}}", r"\frac{\frac{1}{2}}{x}"),
    ],
)
def test_different_answers_are_not(given: str, wanted: str) -> None:
    assert (graded(given, wanted), graded(wanted, given)) == (0.0, 0.0)


@pytest.mark.parametrize("huge", ["1e1000000", "1e-1000000", "9" * 5000, "1/1e1000000"])
def test_a_number_that_would_take_long_to_compute_is_none(huge: str) -> None:
    assert answers.number(huge) is None


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


WRITTEN = [
    "3/4",
    "3 / 4",
    "-3/4",
    "1e-05",
    "1.5e3",
    "-5",
    "\u22125",
    "\uff0d5",
    "\ufe635",
    "1,234.5",
    "1\u202f234",
    ".5",
]
WRITTEN += ["1\u00a0234\u00a0567", "-1\u2009000", "$5", r"\$5", "-$5", r"-\$5", "$-5", "0", "007", str(10**30)]


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize(
    "around", ["{}", "The answer is {}.", "12 and 7, so x = {} ", "it costs {}, not more", r"so \boxed{{{}}}"]
)
def test_a_number_is_read_in_a_completion_as_in_a_row(written: str, around: str) -> None:
    value = answers.number(written)
    assert value is not None
    for score, mark in ((maths.numeric, ""), (maths.gsm8k, ""), (maths.gsm8k, "#### ")):
        said = text(around.format(written) if not mark else f"{around.format('9')}\n{mark}{written}")
        assert asyncio.run(score(said, written)) == 1
        for wrong in {-value, value + 1, Fraction(value.numerator), Fraction(value.denominator)} - {value}:
            assert asyncio.run(score(said, str(wrong))) == 0


def test_numeric_takes_the_box_or_the_last_number() -> None:
    assert asyncio.run(maths.numeric(text("about 0.5"), 0.5)) == 1
    assert asyncio.run(maths.numeric(text(r"\boxed{1/2}, not 3"), "0.5")) == 1
    assert asyncio.run(maths.numeric(text(r"\boxed{x}, so 0.5"), "0.5")) == 0


def test_math_counts_the_box_alone_unless_told_otherwise() -> None:
    assert MATH(text(r"\boxed{\frac{1}{2}}"), r"We get $\boxed{0.5}$.") == 1
    assert MATH(text("0.5"), "0.5") == 0
    anywhere = maths.Math(boxed_only=False)
    assert (anywhere(text(r"so $\{1,2\}$"), r"\{2,1\}"), anywhere(text("so 3"), "4")) == (1, 0)


def test_an_answer_of_the_data_set_that_cannot_be_read_is_an_error_and_no_0() -> None:
    with pytest.raises(TaskError, match="the row's answer is ''"):
        MATH(text(r"\boxed{1}"), "")


def test_math_works_away_from_the_main_thread_where_its_library_could_set_no_alarm() -> None:
    with ThreadPoolExecutor(1) as other:
        scores = [other.submit(graded, given, r"\frac{x}{2}").result() for given in ("0.5x", "2x")]
    assert scores == [1.0, 0.0]


@pytest.mark.slow
def test_an_answer_that_would_compute_for_ever_costs_its_process_and_no_wait_of_the_others() -> None:
    scorer = FunctionScorer(function="streamppo.tasks.scorers.maths:Math", timeout_s=3.0, processes=2)
    config = RewardConfig(scorers={"reward": scorer})
    prompt = Prompt(text="", columns={"answer": r"\frac{1}{2}"})
    completions = [rf"\boxed{{{given}}}" for given in ("9^{9^{9^9}}", "0.5", "1e10000000", "0.5", "2", "0.5")]

    async def story() -> list[Reward | BaseException]:
        rewards = Rewards(config)
        await rewards.start({""})
        try:
            asked = (rewards.score(prompt, text(completion)) for completion in completions)
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await rewards.close()

    first, *others = asyncio.run(story())
    assert "no score after 3 s" in str(first) or "MemoryError" in str(first)
    assert [reward.score for reward in others if isinstance(reward, Reward)] == [1.0, 0.0, 1.0, 0.0, 1.0]


# --- form ----------------------------------------------------------------------------------------------------


def test_patterns_match_whole_completions_over_lines() -> None:
    wanted = format_reward.Pattern(r"<a>.*</a>")
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
    assert asyncio.run(format_reward.think_answer(text(completion))) == score


def test_overlong_is_dapos_equation() -> None:
    overlong = format_reward.Overlong(max_tokens=100, margin=20)
    lengths = {1: 0.0, 80: 0.0, 85: -0.25, 90: -0.5, 100: -1.0, 120: -1.0}
    assert {n: asyncio.run(overlong(text("", num_tokens=n))) for n in lengths} == lengths
    assert asyncio.run(overlong(text("", "length", 1))) == -1.0
    with pytest.raises(ValueError, match="margin"):
        format_reward.Overlong(max_tokens=10, margin=20)


# --- programs ------------------------------------------------------------------------------------------------

ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


LOCAL = "streamppo.tasks.scorers.sandbox:Local"
"""The sandbox that is there on every machine; test_sandbox.py is on the other."""


def run_tests(completion: str, tests: Any, **how: Any) -> Reward:
    return CodeTests(sandbox=LOCAL, **how)(text(completion), tests)


def run_locally(program: str, **how: Any) -> Ran:
    return asyncio.run(Local(**how).run(program, "", RunLimits(timeout_s=30.0)))


def test_the_score_is_the_share_of_tests_that_pass() -> None:
    found = run_tests(ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"])
    assert (found.score, found.components) == (0.5, {"passed": 0.5})
    assert found.explanation == "test 2: AssertionError: assert add(1, 1) == 3"
    assert run_tests(ADD, '["assert add(1, 2) == 3", "assert 0"]', all_or_nothing=True).score == 0.0


LEFT = {
    "nested": "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')",
    "closed": "import os\nos.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)",
    "a link": "import os\nos.symlink('/', 'root'); os.symlink('root', 'again')",
    "a child that goes on": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    end = time.time() + 2\n"
    "    while time.time() < end:\n        try:\n            os.makedirs(f'{time.time()}/x')\n"
    "        except OSError:\n            break\n    os._exit(0)",
}


@pytest.mark.parametrize("left", LEFT)
def test_what_a_program_leaves_in_its_folder_changes_no_score_and_is_removed(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = f"```python\n{LEFT[left]}\nprint('yes')\n```"
    assert run_tests(said, [{"input": "", "output": "yes"}]).score == 1.0
    assert run_tests(said, [{"input": "", "output": "no"}]).score == 0.0
    stays = [str(path) for path in tmp_path.iterdir()]
    # Local has no hold of a child that left its group.
    assert not stays or left == "a child that goes on"
    assert all(f"{path}: what a program left there could not be removed" in caplog.text for path in stays)


def test_standard_input_and_output_are_compared() -> None:
    echo = "print(int(input()) * 2)"
    found = run_tests(echo, [{"input": "4", "output": "8\n"}, {"input": "4", "output": "9"}])
    assert found.score == 0.5
    assert "printed '8\\n' instead of '9'" in found.explanation


@pytest.mark.parametrize("leave", ["import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)"])
def test_a_program_that_leaves_before_its_test_has_not_passed(leave: str) -> None:
    assert run_tests(leave, ["assert add(1, 2) == 3"]).explanation == "test 1: the program ended before its test"


def test_a_program_that_runs_on_is_killed_with_all_that_it_has_started() -> None:
    own = ["sleep", f"987.{os.getpid()}"]
    program = f"import subprocess\nsubprocess.Popen({own})\nwhile True: pass"
    begin = time.perf_counter()
    assert run_tests(program, [""], test_timeout_s=0.5).explanation == "test 1: did not end within 0.5 s"
    assert time.perf_counter() - begin < 30.0
    assert within_a_minute(lambda: not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == own])


def test_a_child_that_holds_the_output_open_does_not_hold_the_reward() -> None:
    program = "import subprocess\nsubprocess.Popen(['sleep', '986'])"
    begin = time.perf_counter()
    assert run_tests(program, [""], test_timeout_s=30.0).score == 1.0
    assert time.perf_counter() - begin < 25.0


def test_a_program_outlives_no_kill_of_the_process_that_runs_it() -> None:
    run = (
        "import asyncio; from streamppo.tasks.scorers.sandbox import RunLimits, Local; "
        "asyncio.run(Local().run('import time; time.sleep(985)', '', RunLimits(600.0)))"
    )
    runner = subprocess.Popen([sys.executable, "-c", run])
    try:
        program = within_a_minute(lambda: asleep(runner.pid))
    finally:
        runner.kill()
        runner.wait()
    assert within_a_minute(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)


def within_a_minute(look: Callable[[], Any]) -> Any:
    """Call `look` until it finds something, and return that."""
    end = time.monotonic() + 60.0
    while not (found := look()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def asleep(parent: int) -> psutil.Process | None:
    """Return the program that this process runs, once its limits are set."""
    for child in psutil.Process(parent).children():
        if str(LAUNCHER) in child.cmdline() and child.rlimit(psutil.RLIMIT_FSIZE)[0] == FILE_BYTES:
            return child
    return None


@pytest.mark.slow
def test_programs_that_hang_score_0_however_many_wait_for_a_process() -> None:
    config = one_function(
        function="streamppo.tasks.scorers.code:CodeTests",
        arguments={"sandbox": LOCAL, "test_timeout_s": 0.5, "all_timeout_s": 1.0},
        timeout_s=4.0,
        processes=1,
    )
    prompt = Prompt(text="", columns={"tests": ["assert True"] * 14})

    async def story() -> list[Reward]:
        rewards = Rewards(config)
        await rewards.start({""})
        try:
            return await asyncio.gather(*(rewards.score(prompt, text("while True: pass")) for _ in range(6)))
        finally:
            await rewards.close()

    found = asyncio.run(story())
    assert [reward.score for reward in found] == [0.0] * 6
    assert found[0].explanation.endswith("test 14: not run: the tests before it took 1 s")


def test_memory_and_output_are_bounded() -> None:
    assert "MemoryError" in run_tests("x = bytearray(2**30)", [""]).explanation
    ran = run_locally("print('x' * 2 * 10**7)")
    assert "File too large" in ran.stderr
    assert len(ran.stdout) == FILE_BYTES


def test_a_program_may_print_much_before_its_test() -> None:
    assert run_tests("print('x' * 10**6)", ["", {"input": "", "output": "x" * 10**6}], test_timeout_s=30.0).score == 1.0


def test_there_is_no_network_where_the_kernel_allows_it() -> None:
    connect = "socket.create_connection(('127.0.0.1', 9), 1)"
    program = f"import socket\ntry:\n    {connect}\nexcept OSError as e:\n    print(e.errno)"
    try:
        ran = run_locally(program, require_no_network=True)
    except TaskError as error:
        pytest.skip(str(error))
    assert ran.stdout == "101\n", "the loopback interface answers: this is the machine's own network"


def test_rows_without_usable_tests_are_errors() -> None:
    for wrong in ([], "{}", [1]):
        with pytest.raises(TaskError):
            run_tests(ADD, wrong)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```\n```\nb\n```", "b\n"),
        ("```python3\na\n```", "a\n"),
        ("```Python\r\na\r\n```", "a\r\n"),
        ('``` py title="a.py"\na```', "a"),
        ("```python\na\n```\nIt prints\n```text\nb\n```\nand ends.\n", "a\n"),
        ("```bash\na\n```", "```bash\na\n```"),
        ("print(1)", "print(1)"),
    ],
)
def test_the_last_block_of_python_is_the_program(completion: str, program: str) -> None:
    assert extract_program(completion) == program
