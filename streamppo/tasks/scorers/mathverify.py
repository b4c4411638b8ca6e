"""Symbolic equality by math-verify (extra `math`): `0.5` and `\\frac{1}{2}` are one answer, sets are known.

Its own timeouts use SIGALRM, which works in main threads alone: they are off. The reward is sync, so it runs in
a killable process, under the timeout of the configuration.
"""

from typing import Any

from streamppo.errors import TaskError
from streamppo.types import ScoredText


class MathVerify:
    """1 when the completion's answer equals `answer`. Raises `TaskError` without the package."""

    def __init__(self) -> None:
        try:
            import math_verify  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise TaskError("MathVerify needs math-verify: pip install 'streamppo[math]'") from error
        # Its signature lacks the None that its documentation offers.
        self._parse: Any = math_verify.parse
        self._verify = math_verify.verify

    def __call__(self, trajectory: ScoredText, answer: str) -> float:
        """See the class."""
        wanted = self._parse(_in_dollars(str(answer)), parsing_timeout=None)
        if not wanted:
            raise TaskError(f"math-verify cannot read the answer {answer!r}")
        given = self._parse(trajectory.completion, parsing_timeout=None)
        return float(self._verify(wanted, given, timeout_seconds=None))


def _in_dollars(answer: str) -> str:
    """Bare LaTeX is read only inside of dollars."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
