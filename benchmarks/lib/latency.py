"""The arithmetic reward with the latency of a service, for throughput.py, reward_latency.py and plan.py."""

import asyncio
import os

from benchmarks.lib import lengths
from streamppo.tasks.library import arithmetic
from streamppo.types import ScoredText

LATENCY = "STREAMPPO_BENCHMARK_LATENCY_S"
"""The environment variable with the latency in seconds."""
LATENCY_S = float(os.environ.get(LATENCY, "0"))


async def score(trajectory: ScoredText, answer: str) -> float:
    """`arithmetic.score` after `LATENCY_S` seconds."""
    await asyncio.sleep(LATENCY_S)
    return await arithmetic.score(trajectory, answer)


async def score_any_length(trajectory: ScoredText, answer: str) -> float:
    """`lengths.score` after `LATENCY_S` seconds, for completions of drawn lengths."""
    await asyncio.sleep(LATENCY_S)
    return await lengths.score(trajectory, answer)
