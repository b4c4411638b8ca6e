"""Faulty rewards, loaded by name like a user's reward."""

import math
import os
import re
import subprocess

from streamppo.tasks.library import arithmetic
from streamppo.types import ScoredText


async def always_raises(trajectory: ScoredText, answer: str) -> float:
    raise RuntimeError("the judge is on holiday")


def of_every_kind(trajectory: ScoredText, answer: str) -> float:
    """Synchronous; for some prompts it raises, hangs with the GIL held, ends the process, or returns NaN."""
    match int(trajectory.prompt[:2]):
        case 12 | 24:
            raise ValueError("no such answer")
        case 13:
            re.match(r"(a+)+$", "a" * 60 + "b")
        case 14 | 28:
            os._exit(3)
        case 15 | 30:
            return math.nan
    return float(trajectory.completion == answer)


programs: list[subprocess.Popen[bytes]] = []


async def starts_programs(trajectory: ScoredText, answer: str) -> float:
    """Start two programs that outlive a run, one of them in a new session."""
    if not programs:
        programs.extend(subprocess.Popen(["sleep", "600"], start_new_session=away) for away in (False, True))
    return await arithmetic.score(trajectory, answer)
