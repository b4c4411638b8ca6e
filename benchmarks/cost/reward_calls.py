"""Calls per second of an async reward through its process, compared with plain httpx, and with stuck calls.

    python benchmarks/cost/reward_calls.py CASE IN_FLIGHT [--calls N] [--json out.json]

    plain     plain httpx calls a service that takes 1 s: the bound
    service   the same client as a reward in its own process
    one       calls that wait 0.5 s; one call blocks its process for 60 s; `timeout_s` is 5
    share     as `one`, but one call in a hundred blocks

`--json` appends the result to a list. Exits with 1 if a call to the healthy service failed.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import calls_reward
from benchmarks.lib.runs import machine
from streamppo import process
from streamppo.config.reward import FunctionScorer, Reward
from streamppo.errors import RewardFailed
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.types import Prompt, ScoredText

LIB = Path(__file__).parents[1] / "lib"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["plain", "service", "one", "share"])
    parser.add_argument("in_flight", type=int)
    parser.add_argument("--calls", type=int, help="3 times as many as are in flight, unless told")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    calls = options.calls or 3 * options.in_flight
    service = subprocess.Popen([sys.executable, str(LIB / "calls_service.py")], stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        url = service.stdout.readline().strip()
        row = asyncio.run(_measure(options.case, options.in_flight, calls, url))
    finally:
        service.kill()
        service.communicate()
    print(json.dumps(row))
    if options.json:
        found = json.loads(options.json.read_text()) if options.json.exists() else {"machine": machine(), "runs": []}
        found["machine"]["versions"]["httpx"] = httpx.__version__
        found["runs"].append(row)
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(bool(row["failed"]) and options.case in ("plain", "service"))


async def _measure(case: str, in_flight: int, calls: int, url: str) -> dict[str, object]:
    texts = [_text(case, url, number) for number in range(calls)]
    if case == "plain":
        # As in a reward's process: otherwise garbage collection of all loaded modules counts as httpx's time.
        process.freeze_gc()
        return {"case": case, **await _all(texts, in_flight, _plain)}
    waits = case != "service"
    scorer = FunctionScorer(
        function=f"{LIB / 'calls_reward.py'}:{'wait' if waits else 'ask'}",
        timeout_s=5.0 if waits else 60.0,
        concurrency=in_flight,
    )
    rewards = Rewards(Reward(scorers={"reward": scorer}))
    await rewards.start({""})

    async def one(text: ScoredText) -> bool:
        try:
            return (await rewards.score(Prompt(text="", columns={}), text)).score == 1.0
        except RewardFailed:
            return False

    try:
        return {"case": case, **await _all(texts, in_flight, one), "respawns": rewards.report()[0].respawns}
    finally:
        await rewards.close()


def _text(case: str, url: str, number: int) -> ScoredText:
    stuck = (case == "one" and number == 100) or (case == "share" and number % 100 == 50)
    return ScoredText(prompt=url, completion="stuck" if stuck else "fine", finish="stop", num_tokens=1)


async def _plain(text: ScoredText) -> bool:
    try:
        return await calls_reward.ask(text) == 1.0
    except httpx.HTTPError:
        return False


async def _all(
    texts: list[ScoredText], in_flight: int, one: Callable[[ScoredText], Awaitable[bool]]
) -> dict[str, object]:
    """Call `one` for each of `texts`, with `in_flight` calls at a time; returns the measurements."""
    waiting = iter(texts)
    longest_s, failed = 0.0, 0

    async def asker() -> None:
        nonlocal longest_s, failed
        for text in waiting:
            begin = time.perf_counter()
            scored = await one(text)
            failed += not scored
            longest_s = max(longest_s, time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(asker() for _ in range(in_flight)))
    taken_s = time.perf_counter() - begin
    return {
        "in_flight": in_flight,
        "calls": len(texts),
        "seconds": taken_s,
        "calls_per_s": len(texts) / taken_s,
        "longest_s": longest_s,
        "failed": failed,
    }


if __name__ == "__main__":
    main()
