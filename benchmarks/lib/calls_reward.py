"""The rewards of reward_calls.py: `ask` calls a service, `wait` sleeps or blocks its process."""

import asyncio
import time
from itertools import cycle

import httpx

from streamppo.types import ScoredText

# An httpx client scans all its connections for every request: many small clients are far faster than a large one.
CLIENTS = cycle(
    [httpx.AsyncClient(limits=httpx.Limits(max_connections=32), timeout=None, verify=False) for _ in range(64)]
)


async def ask(trajectory: ScoredText) -> float:
    """Call the service whose address is the prompt; returns its score."""
    response = await next(CLIENTS).post(trajectory.prompt, json={"given": trajectory.completion})
    return response.json()["score"]


async def wait(trajectory: ScoredText) -> float:
    """Wait for half a second; if the completion is "stuck", block the process for a minute."""
    if trajectory.completion == "stuck":
        time.sleep(60.0)
    await asyncio.sleep(0.5)
    return 1.0
