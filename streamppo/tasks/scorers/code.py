"""A reward for programs: the share of tests that the completion's program passes."""

import json
import re
import secrets
import time
from collections.abc import Callable
from typing import cast

from streamppo.errors import TaskError
from streamppo.tasks import plugins
from streamppo.tasks.scorers.sandbox import Ran, Sandbox
from streamppo.types import Reward, ScoredText

FENCED = re.compile(r"```[ \t]*([^\s`]*)[^\n`]*\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"(?:(?:python|py)[\d.]*)?", re.IGNORECASE)
QUOTED = 300
"""Characters of an output that an explanation quotes."""


class CodeTests:
    """Runs the last fenced block of Python in the completion (or all of it) once for each of the row's `tests`.

    A test is Python code that is run after the program (an `assert` fails it), or an object {"input", "output"}: the
    program's standard output for that standard input, but for white space at the ends of lines. `tests` is a list of
    these, or such a list as JSON. `sandbox` names a class as `package.module:name`.

    The tests of one program run one after another, each for `test_timeout_s` at most and all together for
    `all_timeout_s`, which is to be below the reward's `timeout_s`: a test that does not pass within these has failed.
    It is sync, so that the reward's `processes` say how many programs run at once, and no wait for them is counted.
    """

    def __init__(
        self,
        sandbox: str = "streamppo.tasks.scorers.sandbox:Local",
        test_timeout_s: float = 5.0,
        all_timeout_s: float = 20.0,
        all_or_nothing: bool = False,
    ) -> None:
        self._sandbox = cast(Callable[[], Sandbox], plugins.load(sandbox, "sandbox"))()
        self._test_timeout_s = test_timeout_s
        self._all_timeout_s = all_timeout_s
        self._all_or_nothing = all_or_nothing

    def __call__(self, trajectory: ScoredText, tests: object) -> Reward:
        """Run the tests. Raises `TaskError` for a row without usable tests."""
        listed = json.loads(tests) if isinstance(tests, str) else tests
        if not isinstance(listed, list) or not listed:
            raise TaskError(f"`tests` must be a list that is not empty, not {tests!r}")
        program = program_of(trajectory.completion)
        end = time.monotonic() + self._all_timeout_s
        reasons = [self._test(program, test, end - time.monotonic()) for test in listed]
        passed = reasons.count("") / len(reasons)
        explanation = "\n".join(f"test {number}: {reason}" for number, reason in enumerate(reasons, 1) if reason)
        score = float(passed == 1.0) if self._all_or_nothing else passed
        return Reward(score=score, components={"passed": passed}, explanation=explanation)

    def _test(self, program: str, test: object, left_s: float) -> str:
        """Run one test, and say why it fails; "" when it passes."""
        match test:
            case str():
                # A program that leaves before its test has not passed it.
                wanted = secrets.token_hex(8)
                source, stdin = f"{program}\n\n{test}\nprint({wanted!r})\n", ""
            case {"input": str(stdin), "output": str(wanted)}:
                source = program
            case _:
                raise TaskError(f"a test is code, or has the texts `input` and `output`; this is {test!r}")
        if left_s <= 0:
            return f"not run: the tests before it took {self._all_timeout_s:g} s"
        timeout_s = min(self._test_timeout_s, left_s)
        ran = self._sandbox.run(source, stdin, timeout_s)
        if isinstance(test, str) and ran.exit_code == 0 and not ran.stdout.endswith(f"{wanted}\n"):
            return "it ended before its test"
        return _verdict(ran, None if isinstance(test, str) else wanted, timeout_s)


def program_of(completion: str) -> str:
    """Return the last fenced block that is marked as Python or as nothing, or all of the completion."""
    blocks = [block for language, block in FENCED.findall(completion) if PYTHON.fullmatch(language)]
    return blocks[-1] if blocks else completion


def _verdict(ran: Ran, wanted: str | None, timeout_s: float) -> str:
    if ran.exit_code is None:
        return f"no end after {timeout_s:.3g} s"
    if ran.exit_code:
        return f"exit code {ran.exit_code}: {ran.stderr.strip()[-QUOTED:]}"
    if wanted is not None and _lines(ran.stdout) != _lines(wanted):
        return f"printed {ran.stdout[:QUOTED]!r} instead of {wanted[:QUOTED]!r}"
    return ""


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
