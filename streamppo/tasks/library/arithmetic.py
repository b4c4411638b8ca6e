"""Procedural addition: "12+34=" asks for "46"."""

import numpy as np

from streamppo.errors import TaskError
from streamppo.tasks.scorers import gold
from streamppo.tasks.split import SplitPrompts, held_out_count
from streamppo.types import Prompt, ScoredText

ALPHABET = "0123456789+="


def rows(first: tuple[int, int], second: tuple[int, int], held_out: float, seed: int) -> SplitPrompts:
    """Make all problems a + b in the ranges, ends included. a + b and b + a are both held out, or neither is."""
    pairs = [(a, b) for a in range(first[0], first[1] + 1) for b in range(second[0], second[1] + 1)]
    unordered = sorted({(min(pair), max(pair)) for pair in pairs})
    generator = np.random.default_rng((seed, 0xADD))
    cut = held_out_count(len(unordered), held_out)
    training_pairs = {unordered[int(n)] for n in generator.permutation(len(unordered))[cut:]}
    sides: tuple[list[Prompt], list[Prompt]] = [], []
    for n in generator.permutation(len(pairs)):
        a, b = pairs[int(n)]
        is_held_out = (min(a, b), max(a, b)) not in training_pairs
        sides[is_held_out].append(Prompt(text=f"{a}+{b}=", columns={"answer": str(a + b)}, source="arithmetic"))
    if not sides[0]:
        raise TaskError(f"no addition of {first} and {second} is left to train on (held_out = {held_out:g})")
    return SplitPrompts(*sides)


async def score(trajectory: ScoredText, answer: str) -> float:
    """Score 1 for a completion that is the answer and ended with a stop, else 0. Raises `TaskError` as `gold.text`."""
    return float(trajectory.completion == gold.text(answer) and trajectory.finish == "stop")
