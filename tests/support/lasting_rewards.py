"""Rewards that are busy, sleep, fork or stop a process; as a program, an actor that has called one of them."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from streamppo.types import ScoredText


def fork(*, away: bool) -> None:
    if os.fork() == 0:
        if away:
            os.setsid()
            if os.fork():
                os._exit(0)
        time.sleep(1000)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def score(trajectory: ScoredText) -> float:
    """Do what the completion says, and never return."""
    match trajectory.completion:
        case "busy":
            while True:
                pass
        case "forked":
            fork(away=False)
        case "forked away":
            fork(away=True)
        case "started":
            subprocess.Popen(["sleep", "1000"], start_new_session=True, env={**os.environ})
        case "pool":
            multiprocessing.get_context("fork").Pool(2).map_async(time.sleep, [1000, 1000])
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "template stopped":
            fork(away=False)
            os.kill(os.getppid(), signal.SIGSTOP)
        case "reaper stopped":
            fork(away=True)
            os.kill(parent_of(os.getppid()), signal.SIGSTOP)
        case "hung up":
            fork(away=True)
            os.closerange(3, 256)
    time.sleep(1000)
    return 1.0


async def score_async(trajectory: ScoredText) -> float:
    """As `score`, in the process that all calls share."""
    return score(trajectory)


async def actor(function: str, completion: str) -> None:
    from reward_case import one_function, started, total

    config = one_function(function=f"{__file__}:{function}", timeout_s=300.0, processes=1)
    async with started(config) as rewards:
        await total(rewards, completion)


if __name__ == "__main__":
    asyncio.run(actor(*sys.argv[1:]))
