"""Rewards that misbehave, loaded by name like any user's."""

from streamppo.tasks import arithmetic
from streamppo.types import ScoredText


async def always_raises(trajectory: ScoredText, answer: str) -> float:
    raise RuntimeError("the judge is on holiday")


async def sometimes_raises(trajectory: ScoredText, answer: str) -> float:
    if trajectory.prompt[0] == "1":
        raise RuntimeError("not this one")
    return await arithmetic.score(trajectory, answer)
