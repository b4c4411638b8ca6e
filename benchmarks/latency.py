"""The arithmetic reward, as slow as a service: for benchmarks/throughput.py."""

import asyncio
import os

from streamppo.tasks import arithmetic
from streamppo.types import ScoredText

LATENCY_S = float(os.environ.get("STREAMPPO_BENCHMARK_LATENCY_S", "0"))


async def score(trajectory: ScoredText, answer: str) -> float:
    """`arithmetic.score`, after a wait."""
    await asyncio.sleep(LATENCY_S)
    return await arithmetic.score(trajectory, answer)
