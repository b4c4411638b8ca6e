"""Faulty rewards, loaded by path like a user's reward. The completion names the fault."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamppo.errors import Retryable
from streamppo.types import Reward, ScoredText

CALLS = 0


def misbehave(what: str) -> Any:
    match what:
        case "raises":
            raise ValueError("no such answer")
        case "holds the gil":
            return re.match(r"(a+)+$", "a" * 60 + "b")
        case "nan" | "inf":
            return float(what)
        case "none":
            return None
        case "text":
            return "1.0"
        case "wrong length":
            return Reward(tokens=(1.0,) * 99)
        case "explains":
            return Reward(score=1.0, components={"\ud83d": 1.0}, explanation="\ud83d is half of a pair")
        case "numbered":
            return Reward(components={1: 1.0})  # pyright: ignore[reportArgumentType]
        case "exits":
            os._exit(3)
        case "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "allocates":
            return float(len(bytearray(2**30)))
        case _:
            return speechless(what)
    return 1.0


class Untold(Exception):
    """An exception, and a value, without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def speechless(what: str) -> Any:
    match what:
        case "complains":
            raise ValueError("\ud83d is half of a pair")
        case "cancels":
            raise asyncio.CancelledError
        case "cannot be told":
            raise Untold
        case "cannot be shown":
            return Untold()
        case _:
            return 1.0


def meeting(trajectory: ScoredText) -> float:
    """Return once four calls are under way; each writes a file to the folder named by the completion."""
    folder = Path(trajectory.completion)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 4:
        time.sleep(0.02)
    return 1.0


def sync(trajectory: ScoredText) -> Any:
    if trajectory.completion == "prints":
        print("\ud83d is half of a pair", file=sys.stderr)
        print("\ud83d is half of a pair\nrollout-0: forged", flush=True)
    if trajectory.completion == "spawns":
        subprocess.Popen(["sleep", "985"])
        return misbehave("holds the gil")
    if trajectory.completion == "hangs":
        time.sleep(1000)
    return misbehave(trajectory.completion)


async def awaiting(trajectory: ScoredText) -> Any:
    match trajectory.completion:
        case "hangs":
            await asyncio.sleep(1000)
        case "cancels":
            client = asyncio.get_running_loop().create_future()
            client.cancel()
            await client
        case "swallows":
            with suppress(BaseException):
                await asyncio.sleep(1000)
            return 0.0
        case "blocks":
            time.sleep(1.2)
        case _:
            pass
    await asyncio.sleep(0.02)
    return misbehave(trajectory.completion)


def batched(completions: list[str], **kwargs: Any) -> Any:
    if "short" in completions:
        return [1.0] * (len(completions) + 1)
    return [misbehave(completion) for completion in completions]


def crowd(completions: list[str], **kwargs: Any) -> list[float]:
    time.sleep(0.05)
    return [float(len(completions))] * len(completions)


class Flaky:
    """Succeeds at every `every`-th call."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.calls = 0

    async def __call__(self, trajectory: ScoredText) -> float:
        self.calls += 1
        if self.calls % self.every:
            raise Retryable("the judge is busy")
        return float(self.calls)


class Paid:
    """A batched reward that writes a file for every call. While it scores "first", further completions make a batch."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __call__(self, completions: list[str]) -> Any:
        (self.folder / str(len(list(self.folder.iterdir())))).touch()
        match completions[0]:
            case "first":
                time.sleep(0.1)
                return [1.0]
            case "mean":
                return [1.0]
            case "nan":
                return [float("nan")] * len(completions)
            case "busy":
                raise Retryable("the judge is busy")
        return None


TOGETHER = 24
MET: list[str] = []


async def beside(trajectory: ScoredText) -> float:
    """Wait until `TOGETHER` calls are under way in the process; or block the process as the completion says."""
    match trajectory.completion:
        case "sleeps":
            await asyncio.sleep(0.05)
            time.sleep(1000)
        case "sleeps in a task":
            await asyncio.gather(asyncio.sleep(0.01), nap())
        case "sleeps in a callback":
            asyncio.get_running_loop().call_later(0.05, time.sleep, 1000)
            await asyncio.sleep(1000)
        case "spins":
            while True:
                time.sleep(0.02)
                await asyncio.sleep(0)
        case "kills its template":
            os.kill(os.getppid(), signal.SIGKILL)
            await asyncio.sleep(1000)
        case "blocks a little":
            time.sleep(0.6)
            return 1.0
        case "naps":
            await asyncio.sleep(0.2)
            return 1.0
        case "process":
            return float(os.getpid())
    await asyncio.sleep(0.3)
    MET.append(trajectory.completion)
    while len(MET) < TOGETHER:
        await asyncio.sleep(0.02)
    return 1.0


async def nap() -> None:
    await asyncio.sleep(0.05)
    time.sleep(1000)


def chatty(trajectory: ScoredText) -> float:
    """Print as many MiB as the completion says."""
    for _ in range(16 * int(trajectory.completion)):
        print("x" * 2**16)
    return 1.0


class Panic(BaseException):
    """As the panics of libraries in Rust, no `Exception`."""


def wants_answer(trajectory: ScoredText) -> Any:
    row: dict[str, str] = {}
    if trajectory.completion == "exits":
        sys.exit(7)
    if trajectory.completion == "panics":
        raise Panic("index out of bounds")
    return row["answer"]


async def wants_answer_async(trajectory: ScoredText) -> Any:
    return wants_answer(trajectory)


def scaled(trajectory: ScoredText, factor: float, answer: str) -> float:
    return factor * (trajectory.completion == answer)
