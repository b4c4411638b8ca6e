"""The reward of this run: change it, and try it with `streamppo reward-test run.toml`."""

from streamppo.types import Reward, ScoredText


async def score(trajectory: ScoredText, answer: str) -> Reward:
    """Score 1 for the right answer, else up to 0.2 by the share of letters in their place."""
    placed = sum(a == b for a, b in zip(trajectory.completion, answer, strict=False)) / len(answer)
    right = trajectory.finish == "stop" and trajectory.completion == answer
    return Reward(score=1.0 if right else 0.2 * placed, components={"right": float(right), "placed": placed})
