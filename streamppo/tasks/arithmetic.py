"""Procedural addition: "12+34=" asks for "46"."""

from collections.abc import Sequence

import numpy as np

from streamppo.errors import TaskError
from streamppo.types import Prompt, ScoredText

ALPHABET = "0123456789+="


class Arithmetic:
    """Every a + b with a and b in the given ranges, both ends included; split by the seed."""

    def __init__(self, first: tuple[int, int], second: tuple[int, int], held_out: float, seed: int) -> None:
        problems = [
            Prompt(text=f"{a}+{b}=", columns={"answer": str(a + b)})
            for a in range(first[0], first[1] + 1)
            for b in range(second[0], second[1] + 1)
        ]
        order = np.random.default_rng((seed, 0xADD)).permutation(len(problems))
        cut = round(held_out * len(order))
        self.held_out: Sequence[Prompt] = [problems[int(n)] for n in order[:cut]]
        self.training: Sequence[Prompt] = [problems[int(n)] for n in order[cut:]]
        if not self.training:
            raise TaskError(f"no addition of {first} and {second} is left to train on (held_out = {held_out:g})")


async def score(trajectory: ScoredText, answer: str) -> float:
    """1.0 for exactly the answer and an end-of-sequence after it, else 0.0."""
    return float(trajectory.finish == "stop" and trajectory.completion == answer)
