"""The rewards of reward_calls.py: one asks a service, the other waits, or is stuck."""

import asyncio
import time
from itertools import cycle

import httpx

from streamppo.types import ScoredText

# A client of httpx looks at all of its connections for every request: many small ones are far faster than a large one.
CLIENTS = cycle(
    [httpx.AsyncClient(limits=httpx.Limits(max_connections=32), timeout=None, verify=False) for _ in range(64)]
)


async def ask(trajectory: ScoredText) -> float:
    """Ask the service whose address is the prompt."""
    response = await next(CLIENTS).post(trajectory.prompt, json={"given": trajectory.completion})
    return response.json()["score"]


async def wait(trajectory: ScoredText) -> float:
    """Wait for half a second; or hold the process for a minute."""
    if trajectory.completion == "stuck":
        time.sleep(60.0)
    await asyncio.sleep(0.5)
    return 1.0
