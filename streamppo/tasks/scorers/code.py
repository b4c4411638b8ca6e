"""A reward for programs: the share of tests that the completion's program passes."""

import asyncio
import json
import re
import secrets
from typing import Any

from streamppo.errors import TaskError
from streamppo.tasks import plugins
from streamppo.tasks.scorers.sandbox import Ran, Sandbox
from streamppo.types import Reward, ScoredText

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
QUOTED = 300


class CodeTests:
    """Runs the last fenced block of the completion (or all of it) once for each of the row's `tests`.

    A test is Python code that is run after the program (an `assert` fails it), or an object {"input", "output"}: the
    program's standard output for that standard input, but for white space at the ends of lines. `tests` is a list of
    these, or such a list as JSON. `sandbox` names a class as `package.module:name`.
    """

    def __init__(
        self,
        sandbox: str = "streamppo.tasks.scorers.sandbox:Local",
        test_timeout_s: float = 5.0,
        at_once: int = 2,
        all_or_nothing: bool = False,
    ) -> None:
        self._sandbox: Sandbox = plugins.load(sandbox, "sandbox")()
        self._timeout_s = test_timeout_s
        self._all_or_nothing = all_or_nothing
        self._room = asyncio.Semaphore(at_once)

    async def __call__(self, trajectory: ScoredText, tests: Any) -> Reward:
        """See the class. Raises `TaskError` for a row without usable tests."""
        listed = json.loads(tests) if isinstance(tests, str) else tests
        if not isinstance(listed, list) or not listed:
            raise TaskError(f"`tests` must be a list that is not empty, not {tests!r}")
        program = program_of(trajectory.completion)
        reasons = await asyncio.gather(*(self._test(program, test) for test in listed))
        passed = reasons.count("") / len(reasons)
        explanation = "\n".join(f"test {number}: {reason}" for number, reason in enumerate(reasons, 1) if reason)
        score = float(passed == 1.0) if self._all_or_nothing else passed
        return Reward(score=score, components={"passed": passed}, explanation=explanation)

    async def _test(self, program: str, test: Any) -> str:
        """Why the test fails; "" when it passes."""
        match test:
            case str():
                # A program that leaves before its test has not passed it.
                wanted = secrets.token_hex(8)
                source, stdin = f"{program}\n\n{test}\nprint({wanted!r})\n", ""
            case {"input": str(stdin), "output": str(wanted)}:
                source = program
            case _:
                raise TaskError(f"a test is code, or has the texts `input` and `output`; this is {test!r}")
        async with self._room:
            ran = await self._sandbox.run(source, stdin, self._timeout_s)
        if isinstance(test, str) and ran.exit_code == 0 and not ran.stdout.endswith(f"{wanted}\n"):
            return "it ended before its test"
        return _verdict(ran, None if isinstance(test, str) else wanted, self._timeout_s)


def program_of(completion: str) -> str:
    """The last fenced block, or all of it."""
    blocks = FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def _verdict(ran: Ran, wanted: str | None, timeout_s: float) -> str:
    if ran.exit_code is None:
        return f"no end after {timeout_s:g} s"
    if ran.exit_code:
        return f"exit code {ran.exit_code}: {ran.stderr.strip()[-QUOTED:]}"
    if wanted is not None and _lines(ran.stdout) != _lines(wanted):
        return f"printed {ran.stdout[:QUOTED]!r} instead of {wanted[:QUOTED]!r}"
    return ""


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
