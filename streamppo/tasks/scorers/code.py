"""A reward for programs: the share of tests that the completion's program passes."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias, TypedDict, cast

from streamppo.errors import TaskError
from streamppo.tasks import plugins
from streamppo.tasks.scorers.sandbox import Ran, RunLimits, Sandbox
from streamppo.types import Reward, ScoredText

FENCED = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"(?:(?:python|py)[\d.]*)?", re.IGNORECASE)
DEFAULT = "streamppo.tasks.scorers.bubblewrap:Bubblewrap"
TEXTS = [Path(__file__).with_name(f"{name}.py").read_text() for name in ("plain_data", "exceptions", "isolated_tests")]
TEST_PROGRAM = re.sub(r"^from streamppo.*\n", "", "".join(TEXTS), flags=re.MULTILINE)
"""The program for both sides of a code test, as one source, because sandboxes lack our package."""
DONE = '"done"'
REMEMBERED = 1024
"""Number of rows whose tests' first operations are cached."""
QUOTED = 300
"""Number of characters of an output that an explanation quotes."""

Test: TypeAlias = str | dict[str, str]
Operations: TypeAlias = str
"""A JSON list. The scorer does not decode the list, because the program's values in it may be nested to any depth."""


class Verdict(TypedDict, total=False):
    """One line of the checker's output: the result of a test, see `isolated_tests.verdict`."""

    passed: bool
    failed: str
    unusable: str
    ask: Operations
    certain: int
    lost: bool


class Exchange:
    """One code test: the operations that it needs, and the program's answers so far."""

    def __init__(self, code: str, operations: Operations) -> None:
        self.code = code
        self.operations = operations
        self.answers: list[str] = []
        self.reason: str | None = None
        """The reason for the test's failure, "" if the test passed, None while it is running."""
        self._short = ""
        self._certain = -1
        self._before: list[str] = []

    def take_answers(self, ran: Ran, limits: RunLimits) -> None:
        """Store the program's answers. The program may have ended before the last answer."""
        self._before = self.answers
        lines = [line for line in ran.stdout.split("\n") if line]
        self._short = "" if lines[-1:] == [DONE] else _failure_of(ran, limits) or "the program ended before its test"
        self.answers = [line for line in lines if line != DONE]
        if self._short and not self.answers:
            self.reason = self._short

    def take_verdict(self, verdict: Verdict) -> None:
        """Apply the checker's verdict. Raises `TaskError` for a test whose operations change in every run."""
        if "ask" not in verdict:
            self.reason = verdict.get("failed", "")
            return
        certain, before = verdict.get("certain", 0), self._certain
        if self._short:
            self.reason = self._short
        elif certain > before:
            self.operations, self._certain = verdict["ask"], certain
        elif self.answers[:before] != self._before[:before]:
            self.reason = "the program's answers change in every run"
        else:
            raise TaskError(
                f"the test {self.code[:QUOTED]!r} is unusable: its operations change in every run (the clock?)"
            )


class CodeTests:
    """Tests the last fenced block of Python in the completion (or all of it) by the row's `tests`.

    A test is Python code that calls the program's definitions (a failed `assert` fails it), or an object {"input",
    "output"}: standard input and the expected standard output, compared without white space at line ends. `tests` is a
    list of tests, an object {"inputs", "outputs"} of two lists (APPS, TACO), or the JSON of these. If a row has an
    `entry_point` (HumanEval), `tests` may be code that defines check(candidate).

    The program can never read or change a test: test code runs in another sandbox, and only calls and plain values pass
    between them (isolated_tests.py). A test that compares objects of the program's classes fails. A test that passes a
    function to the program raises `TaskError`, because no program could pass this test.

    Every test runs the program again, for at most `test_timeout_s`; all tests together have `all_timeout_s`, which must
    be below the reward's `timeout_s`. A test that does not pass in time has failed. `sandbox` is a class,
    `package.module:name`. The scorer is sync, so the reward's `processes` bound the number of concurrent programs.
    """

    def __init__(
        self,
        sandbox: str = DEFAULT,
        test_timeout_s: float = 5.0,
        all_timeout_s: float = 20.0,
        all_or_nothing: bool = False,
        memory_mib: int = 512,
    ) -> None:
        self._sandbox = _sandbox(sandbox)
        self._limits = RunLimits(test_timeout_s, memory_mib)
        self._all_timeout_s = all_timeout_s
        self._all_or_nothing = all_or_nothing
        self._first: dict[str, list[Operations]] = {}

    @staticmethod
    def place(arguments: Mapping[str, object]) -> str:
        """Describe the sandbox in the scorer's `arguments`. Raises `TaskError` if the sandbox does not work here."""
        name = str(arguments.get("sandbox", DEFAULT))
        _sandbox(name)
        return f"programs run in {name}{', which does not isolate them' if name.endswith('sandbox:Local') else ''}"

    def __call__(self, trajectory: ScoredText, tests: object, entry_point: object = "") -> Reward:
        """Run the tests. Raises `TaskError` for a row without usable tests."""
        test_list = read_tests(tests, entry_point)
        program = extract_program(trajectory.completion)
        reasons = asyncio.run(self._failures(program, test_list))
        passed = reasons.count("") / len(reasons)
        explanation = "\n".join(f"test {number}: {reason}" for number, reason in enumerate(reasons, 1) if reason)
        explanation = explanation.encode(errors="backslashreplace").decode()
        score = float(passed == 1.0) if self._all_or_nothing else passed
        return Reward(score=score, components={"passed": passed}, explanation=explanation)

    async def _failures(self, program: str, tests: list[Test]) -> list[str]:
        end = time.monotonic() + self._all_timeout_s
        codes = [test for test in tests if isinstance(test, str)]
        of_codes = iter(await self._test_codes(program, codes, end) if codes else [])
        return [
            next(of_codes) if isinstance(item, str) else await self._test_output(program, item, end) for item in tests
        ]

    async def _test_output(self, program: str, test: dict[str, str], end: float) -> str:
        limits = self._remaining_limits(end)
        if limits is None:
            return self._timeout_reason()
        ran = await self._sandbox.run(program, test["input"], limits)
        if reason := _failure_of(ran, limits):
            return reason
        expected = test["output"]
        same = _lines(ran.stdout) == _lines(expected)
        return "" if same else f"printed {ran.stdout[:QUOTED]!r} instead of {expected[:QUOTED]!r}"

    async def _test_codes(self, program: str, codes: list[str], end: float) -> list[str]:
        """Exchange operations and answers of checker and program until each test has ended or makes no progress."""
        exchanges = [Exchange(code, first) for code, first in zip(codes, await self._first_of(codes, end), strict=True)]
        while waiting := [exchange for exchange in exchanges if exchange.reason is None]:
            for exchange in waiting:
                limits = self._remaining_limits(end)
                if limits is None:
                    exchange.reason = self._timeout_reason()
                    continue
                task = {"program": program, "operations": exchange.operations}
                ran = await self._sandbox.run(TEST_PROGRAM, json.dumps(task), limits)
                exchange.take_answers(ran, limits)
            waiting = [exchange for exchange in waiting if exchange.reason is None]
            if waiting:
                for exchange, verdict in zip(waiting, await self._check(waiting, end), strict=True):
                    exchange.take_verdict(verdict)
        return [exchange.reason or "" for exchange in exchanges]

    async def _first_of(self, codes: list[str], end: float) -> list[Operations]:
        """Return the operations that tests need before any answer; they are the same for every program."""
        key = json.dumps(codes)
        if key in self._first:
            return self._first[key]
        verdicts = await self._check([Exchange(code, "[]") for code in codes], end)
        first = [verdict.get("ask", "[]") for verdict in verdicts]
        if not any("lost" in verdict for verdict in verdicts):
            if len(self._first) >= REMEMBERED:
                self._first.clear()
            self._first[key] = first
        return first

    async def _check(self, exchanges: list[Exchange], end: float) -> list[Verdict]:
        """Run each test on the answers so far, with a time limit. Raises `TaskError` for an unusable test."""
        tests = [
            {"code": exchange.code, "operations": exchange.operations, "answers": exchange.answers}
            for exchange in exchanges
        ]
        each_s = self._limits.timeout_s
        all_s = min(each_s * len(tests), end - time.monotonic())
        if all_s <= 0:
            return [{"failed": self._timeout_reason(), "lost": True} for _ in exchanges]
        task = {"tests": tests, "timeout_s": each_s, "all_timeout_s": all_s}
        # The checker gets one second more, so that it can report its own time limit.
        limits = self._limits._replace(timeout_s=all_s + 1.0)
        ran = await self._sandbox.run(TEST_PROGRAM, json.dumps(task), limits)
        verdicts = _verdicts(ran.stdout)[: len(tests)]
        for exchange, verdict in zip(exchanges, verdicts, strict=False):
            if "unusable" in verdict:
                raise TaskError(f"the test {exchange.code[:QUOTED]!r} is unusable: {verdict['unusable']}")
        reason = f"the test could not run on the program's answers: {_failure_of(ran, limits) or 'they are too long'}"
        lost: Verdict = {"failed": reason, "lost": True}
        return [*verdicts, *[lost] * (len(tests) - len(verdicts))]

    def _remaining_limits(self, end: float) -> RunLimits | None:
        left_s = end - time.monotonic()
        return self._limits._replace(timeout_s=min(self._limits.timeout_s, left_s)) if left_s > 0 else None

    def _timeout_reason(self) -> str:
        return f"not run: the tests before it took {self._all_timeout_s:g} s"


def extract_program(completion: str) -> str:
    """Return the last fenced block that is marked as Python or unmarked; the whole completion if there is none."""
    blocks = [block for language, block in FENCED.findall(completion) if PYTHON.fullmatch(language)]
    return blocks[-1] if blocks else completion


def _sandbox(name: str) -> Sandbox:
    make = cast(Callable[[], Sandbox], plugins.load(name, "sandbox"))
    return plugins.call(f"sandbox {name!r}", make)


def read_tests(tests: object, entry_point: object = "") -> list[Test]:
    """Return the tests of a row (`CodeTests`), which may be JSON. Raises `TaskError` if there are no usable tests."""
    if isinstance(tests, str):
        try:
            return read_tests(json.loads(tests) or None)
        except (ValueError, RecursionError) as error:
            if isinstance(entry_point, str) and entry_point.isidentifier() and "def check(" in tests:
                return [f"{tests}\ncheck({entry_point})\n"]
            raise TaskError(
                f"`tests` is a text that is not JSON: {error}; a test in code is in a list, or defines "
                "check(candidate) and has a column entry_point beside it"
            ) from error
    match tests:
        case {"inputs": list(inputs), "outputs": list(outputs)} | {"input": list(inputs), "output": list(outputs)}:
            return read_tests(_paired(cast("Mapping[str, object]", tests), inputs, outputs))
        case list() if tests:
            pass
        case _:
            raise TaskError(f"`tests` must be a list that is not empty, not {tests!r:.{QUOTED}}")
    for test in tests:
        match test:
            case str() | {"input": str(), "output": str()}:
                pass
            case _:
                raise TaskError(f"a test is code, or has the texts `input` and `output`; this is {test!r:.{QUOTED}}")
    return tests


def _paired(tests: Mapping[str, object], inputs: list[object], outputs: list[object]) -> list[dict[str, object]]:
    if name := tests.get("fn_name"):
        raise TaskError(f"`tests` call the function {name!r} (fn_name): write them as code, such as `assert f(1) == 2`")
    if len(inputs) != len(outputs):
        raise TaskError(f"`tests` have {len(inputs)} inputs and {len(outputs)} outputs")
    return [{"input": _joined(given), "output": _joined(wanted)} for given, wanted in zip(inputs, outputs, strict=True)]


def _joined(value: object) -> object:
    is_lines = isinstance(value, list) and all(isinstance(line, str) for line in cast("list[object]", value))
    return "\n".join(cast("list[str]", value)) if is_lines else value


def _failure_of(ran: Ran, limits: RunLimits) -> str:
    if ran.exit_code is None:
        return f"did not end within {limits.timeout_s:.3g} s"
    return f"exit code {ran.exit_code}: {ran.stderr.strip()[-QUOTED:]}" if ran.exit_code else ""


def _verdicts(text: str) -> list[Verdict]:
    """Read the lines of the checker up to the first line that a limit has truncated."""
    verdicts: list[Verdict] = []
    for line in filter(None, text.split("\n")):
        try:
            verdicts.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return verdicts


def _lines(text: str) -> list[str]:
    # `str.splitlines` would also split at nine other separators, which are ordinary characters here.
    return [line.rstrip() for line in text.rstrip().split("\n")]
