"""A task with answers of heavy-tailed lengths that a tiny model can learn on a CPU: every letter becomes the next one.

    "cab>" -> "dbc"        a final reward: 1 for the right answer, else up to `PLACED` for letters in place

The lengths are drawn once, when the files are written; some problems are held out. For staleness.py.
"""

import json
import math
import random
from pathlib import Path
from statistics import NormalDist

from streamppo.types import ScoredText

LETTERS = "abcdefgh"
MEDIAN, SPREAD = 4, 16
"""The median length in letters, and the ratio of the longest to the median length."""
LONGEST = MEDIAN * SPREAD
SIGMA, TAIL = 1.0, 1.3
"""Standard deviation of the logarithm; index of the Pareto distribution."""
PROBLEMS, HELD_OUT = 20_000, 256
PLACED = 0.2
"""The reward of a completion with every letter in place that does not end there."""


async def score(trajectory: ScoredText, answer: str) -> float:
    """Score a completion: 1 for the right answer, else `PLACED` times the share of letters in place."""
    if trajectory.finish == "stop" and trajectory.completion == answer:
        return 1.0
    return PLACED * sum(a == b for a, b in zip(trajectory.completion, answer, strict=False)) / len(answer)


def quantile(shape: str, share: float, median: int = MEDIAN) -> int:
    """The `share` quantile of the lengths of `shape`."""
    if shape == "pareto":
        length = median * (2 * (1 - share)) ** (-1 / TAIL)
    else:
        length = median * math.exp(SIGMA * NormalDist().inv_cdf(share))
    return max(1, min(median * SPREAD, round(length)))


def write(folder: Path, shape: str, seed: int = 1, median: int = MEDIAN) -> None:
    """Write train.jsonl and held_out.jsonl with lengths of `shape`, lognormal or pareto."""
    draw = random.Random(seed)
    rows: list[str] = []
    for _ in range(PROBLEMS):
        length = quantile(shape, min(max(draw.random(), 1e-9), 1 - 1e-9), median)
        text = "".join(draw.choices(LETTERS, k=length))
        answer = "".join(chr(ord(letter) + 1) for letter in text)
        rows.append(json.dumps({"prompt": f"{text}>", "answer": answer}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held_out.jsonl").write_text("".join(rows[:HELD_OUT]))
    (folder / "train.jsonl").write_text("".join(rows[HELD_OUT:]))
