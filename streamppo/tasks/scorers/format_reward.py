"""Rewards for the format of a completion: a pattern, tags, length."""

import re

from streamppo.types import ScoredText


class Pattern:
    """Score 1 if the whole completion matches the regular expression `pattern` (. matches newlines), else 0."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, trajectory: ScoredText) -> float:
        """Sync, because a regular expression can take very long."""
        return float(self._pattern.fullmatch(trajectory.completion) is not None)


async def think_answer(trajectory: ScoredText) -> float:
    """Score 1 for a single <think>...</think> and <answer>...</answer>, else 0 (https://arxiv.org/abs/2501.12948)."""
    text = trajectory.completion.strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    places = [text.find(tag) for tag in tags]
    once = all(text.count(tag) == 1 for tag in tags)
    return float(once and places == sorted(places) and places[0] == 0 and text.endswith(tags[-1]))


class Overlong:
    """DAPO's soft overlong penalty for n tokens (https://arxiv.org/abs/2503.14476, equation 13).

    0                                   up to max_tokens - margin
    (max_tokens - margin - n) / margin  between
    -1                                  above max_tokens, and for a truncated completion
    """

    def __init__(self, max_tokens: int, margin: int) -> None:
        if not 0 < margin <= max_tokens:
            raise ValueError(f"margin ({margin}) must be above 0 and at most max_tokens ({max_tokens})")
        self._max_tokens = max_tokens
        self._margin = margin

    async def __call__(self, trajectory: ScoredText) -> float:
        if trajectory.finish == "length":
            return -1.0
        beyond = self._max_tokens - self._margin - trajectory.num_tokens
        return min(0.0, max(-1.0, beyond / self._margin))
