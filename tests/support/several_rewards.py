"""Rewards for tests with several scorers; processes import them by this file's path."""

from typing import Any

from streamppo.types import Reward as Given
from streamppo.types import ScoredText


async def length(trajectory: ScoredText) -> Given:
    return Given(score=float(len(trajectory.completion)), components={"half": 0.5}, explanation="so long")


async def per_token(trajectory: ScoredText) -> Given:
    return Given(tokens=tuple(range(trajectory.num_tokens)), turns=(10.0,))


def no_opinion(completions: list[str], **kwargs: Any) -> list[None]:
    return [None] * len(completions)
