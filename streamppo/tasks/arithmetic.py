"""Procedural addition: "12+34=" asks for "46"."""

from collections.abc import Sequence

import numpy as np

from streamppo.types import Prompt, ScoredText

ALPHABET = "0123456789+="


class Arithmetic:
    """Every a + b with a of at most `digits[0]` and b of at most `digits[1]` digits, split by the seed."""

    def __init__(self, digits: tuple[int, int], held_out: float, seed: int) -> None:
        first, second = 10 ** digits[0], 10 ** digits[1]
        order = np.random.default_rng((seed, 0xADD)).permutation(first * second)
        cut = round(held_out * len(order))
        problems = [_prompt(*divmod(int(number), second)) for number in order]
        self.held_out: Sequence[Prompt] = problems[:cut]
        self.training: Sequence[Prompt] = problems[cut:]


def _prompt(a: int, b: int) -> Prompt:
    return Prompt(text=f"{a}+{b}=", columns={"answer": str(a + b)})


async def score(trajectory: ScoredText, answer: str) -> float:
    """1.0 for exactly the answer and an end-of-sequence after it, else 0.0."""
    return float(trajectory.finish == "stop" and trajectory.completion == answer)
