"""Helpers for tests of rewards: started rewards, and the faulty ones."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from streamppo.config.reward import FunctionScorer, Reward
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.types import Prompt, ScoredText

FAULTY = Path(__file__).parent / "faulty_rewards.py"
TIMEOUT_S = 1.0


def text(completion: str, finish: str = "stop", **more: Any) -> ScoredText:
    return ScoredText(prompt="1+2=", completion=completion, finish=finish, num_tokens=len(completion), **more)  # pyright: ignore


@asynccontextmanager
async def started(config: Reward) -> AsyncIterator[Rewards]:
    rewards = Rewards(config)
    try:
        await rewards.start({""})
        yield rewards
    finally:
        await rewards.close()


def one_function(**fields: Any) -> Reward:
    return Reward(scorers={"reward": FunctionScorer(**fields)})


def faulty(name: str, **more: Any) -> Reward:
    fields = {"timeout_s": TIMEOUT_S, "memory_mib": 256, "processes": 1, **more}
    return one_function(function=f"{FAULTY}:{name}", **fields)


async def total(rewards: Rewards, completion: str, **columns: Any) -> float:
    return (await rewards.score(Prompt(text="1+2=", columns=columns), text(completion))).total


def processes() -> list[psutil.Process]:
    """The reward processes of these tests, templates first, without the templates' reapers."""
    here, found = psutil.Process(), list[psutil.Process]()
    for one in here.children(recursive=True):
        # It may end in between.
        with contextlib.suppress(psutil.NoSuchProcess):
            if "streamppo.tasks.rewards.processes.worker" in one.cmdline() and one.ppid() != here.pid:
                found.append(one)
    return found
