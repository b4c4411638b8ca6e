"""Deliveries and tickets per second of the queue, with journal and archive, under many simulated engines.

    python benchmarks/cost/queue_load.py --json queue.json --plot queue.png [--engines 1 16 256] [--tokens 100 2000]

The queue's actor is an object in this process, and each engine is two coroutines of its event loop. So the cost is that
of the event loop, the rules, the journal and the archive, without Ray's calls. Engines generate in no time: all waiting
is for the queue.

    lone delivery    CPU milliseconds of one delivery while every engine waits for a ticket and for a version
    per second       every engine requests a ticket, delivers a trajectory for it and starts again, and swaps to each
                     version; the learner takes and publishes one batch after another. Latencies are under this load:
                     of a delivery from the call to its reply, of a ticket from the request to the ticket
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import plots
from benchmarks.lib.runs import machine
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.queue.actor import QueueActor
from streamppo.types import Push, Ticket, Trajectory, decode, encode

CONFIG = Path(__file__).parents[2] / "configs" / "math.toml"
ENGINES, TOKENS = (1, 16, 256, 1024, 4096), (100, 2_000, 32_000)
QUICK = ((16, 100), (4096, 100), (256, 2_000))
"""Engines and tokens of the cases of `--quick`."""
BATCH_TOKENS = 2**23
"""Most tokens of a batch; within this bound a batch has one trajectory per engine."""
SMALLEST_BATCH = 256
LONE = 20
"""Deliveries measured while every engine waits."""
HELD = 64
"""Trajectories per delivery of the actor that holds all tickets at the start of a case."""
WARM_S = 10.0
VOCABULARY = 50_000
PROMPT_TOKENS = 100
SETTLED_S = 0.3
"""Seconds after which every engine waits in the queue, or has called again."""


class Load:
    """Simulated engines and a learner of one queue, and the durations of their calls in seconds."""

    def __init__(self, queue: Any, engines: int, tokens: int) -> None:
        self.queue, self.engines, self.tokens = queue, engines, tokens
        self.version = 0
        self.deliver_s: list[float] = []
        self.ticket_s: list[float] = []
        random = np.random.default_rng(0)
        self._columns: dict[str, Any] = {
            "prompt_tokens": random.integers(0, VOCABULARY, PROMPT_TOKENS, dtype="<i4").tobytes(),
            "tokens": random.integers(0, VOCABULARY, tokens, dtype="<i4").tobytes(),
            "logprobs": (-random.random(tokens, dtype="<f4")).tobytes(),
            "mask": np.ones(tokens, dtype=np.bool_).tobytes(),
        }

    def finished(self, tickets: Sequence[Ticket], name: str, version: int) -> tuple[Trajectory, ...]:
        """The trajectories of `tickets`."""
        versions = np.full(self.tokens, version, dtype="<i4").tobytes()
        return tuple(
            Trajectory(identity=one.identity, actor=name, versions=versions, finish="stop", reward=1.0, **self._columns)
            for one in tickets
        )

    async def deliver(self, name: str, version: int, made: tuple[Trajectory, ...]) -> None:
        """Deliver trajectories as a rollout actor does."""
        await self.queue.deliver(name, version, encode(made), encode(()))

    async def sample(self, name: str) -> None:
        """Request tickets and deliver their trajectories, one after another, forever."""
        call = 0
        while True:
            begin = time.perf_counter()
            tickets: tuple[Ticket, ...] = ()
            while not tickets:
                tickets = decode(await self.queue.issue(name, self.version, 1, call), tuple[Ticket, ...])
            call += 1
            asked = time.perf_counter()
            self.ticket_s.append(asked - begin)
            made = self.finished(tickets, name, self.version)
            begin = time.perf_counter()
            await self.deliver(name, self.version, made)
            self.deliver_s.append(time.perf_counter() - begin)

    async def follow(self, name: str) -> None:
        """Swap to each new version, forever."""
        version = 0
        while True:
            if found := await self.queue.weights_after(name, version, version):
                version = decode(found[-1][0], Push).version

    async def learn(self) -> None:
        """Take one batch after another and publish the version that it makes, forever."""
        while True:
            await self.queue.take(self.version)
            await self.queue.publish(push(self.version + 1), [], b"", 0)
            self.version += 1

    async def lone(self, tickets: Sequence[Ticket]) -> list[float]:
        """CPU milliseconds of each ticket's delivery, including the tasks that it wakes."""
        cost_ms: list[float] = []
        for ticket in tickets:
            made = self.finished([ticket], "holder", 0)
            begin = time.process_time()
            await self.deliver("holder", 0, made)
            # Woken tasks have run after three passes of the event loop.
            for _ in range(3):
                await asyncio.sleep(0)
            cost_ms.append(1e3 * (time.process_time() - begin))
        return cost_ms


async def _measure(folder: Path, engines: int, tokens: int, seconds: float) -> dict[str, float]:
    batch = max(SMALLEST_BATCH, min(engines, BATCH_TOKENS // tokens))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    # Any: its methods are typed as those of a remote actor.
    queue: Any = QueueActor(
        msgspec.msgpack.encode(config_of(batch, tokens)),
        str(folder),
        str(folder),
        put=cast(Any, lambda encoded: encoded),
    )
    await queue.begin(0)
    await queue.publish(push(0), [], b"", 0)
    load = Load(queue, engines, tokens)
    held = decode(await queue.issue("holder", 0, 2 * batch, 0), tuple[Ticket, ...])
    names = [f"engine-{number}" for number in range(engines)]
    tasks = [asyncio.create_task(work(name)) for name in names for work in (load.sample, load.follow)]
    await asyncio.sleep(SETTLED_S)
    lone_ms = await load.lone(held[:LONE])
    for first in range(LONE, len(held), HELD):
        await load.deliver("holder", 0, load.finished(held[first : first + HELD], "holder", 0))
    tasks.append(asyncio.create_task(load.learn()))
    # The first versions consume the holder's trajectories and free its slots.
    with suppress(TimeoutError):
        async with asyncio.timeout(WARM_S):
            while load.version < 2:
                await asyncio.sleep(0.01)
    load.deliver_s.clear()
    load.ticket_s.clear()
    begin, cpu, version = time.perf_counter(), time.process_time(), load.version
    await asyncio.sleep(seconds)
    wall, cpu, delivered = time.perf_counter() - begin, time.process_time() - cpu, len(load.deliver_s)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    return {
        "engines": engines,
        "tokens": tokens,
        "batch": batch,
        "lone_delivery_cpu_ms": statistics.median(lone_ms),
        "deliveries_per_s": delivered / wall,
        "tickets_per_s": len(load.ticket_s) / wall,
        "versions_per_s": (load.version - version) / wall,
        "cpu_ms_per_delivery": 1e3 * cpu / max(1, delivered),
        **latencies("deliver", load.deliver_s),
        **latencies("ticket", load.ticket_s),
    }


def latencies(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile in ms, under names that begin with `name`."""
    found = sorted(seconds) or [float("nan")]
    return {
        f"{name}_{share}_ms": 1e3 * found[min(len(found) - 1, len(found) * percent // 100)]
        for share, percent in (("median", 50), ("p99", 99))
    }


def config_of(batch: int, tokens: int, *more: str) -> Config:
    """The configuration of a queue for batches of `batch` completions of `tokens`, with `more` overrides."""
    overrides = (f"queue.batch_size={batch}", "queue.samples_per_prompt=1", "queue.max_lag=1", "learner.minibatches=1")
    return configfile.load(CONFIG, (*overrides, f"rollout.max_tokens={tokens}", *more))


def push(version: int) -> bytes:
    """An encoded push of a version without tensors."""
    return encode(Push(version=version, base_version=None, tensors=(), pieces=(), bucket_bytes=()))


def _plot(rows: Sequence[dict[str, float]], path: Path) -> None:
    """Plot deliveries per second, their latency and their cost by number of engines, with a line for each length."""
    shown = {"deliveries_per_s": "deliveries/s", "deliver_p99_ms": "p99 of a delivery, ms"}
    shown |= {"cpu_ms_per_delivery": "CPU ms a delivery"}
    with plots.axes(path, len(shown)) as axes:
        for axis, (name, label) in zip(axes, shown.items(), strict=True):
            for tokens in dict.fromkeys(row["tokens"] for row in rows):
                line = sorted((row["engines"], row[name]) for row in rows if row["tokens"] == tokens)
                axis.loglog(*zip(*line, strict=True), "o-", label=f"{tokens:,.0f} tokens")
            axis.set(xlabel="engines", ylabel=label)
            axis.legend()


def main() -> None:
    """Measure every case, print a table, and write it down with the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--quick", action="store_true", help="three cases of two seconds: less than a minute")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    cases = QUICK if options.quick else [(engines, tokens) for tokens in options.tokens for engines in options.engines]
    seconds = 2.0 if options.quick else options.seconds
    heads = ("engines", "tokens", "deliveries/s", "tickets/s", "CPU ms", "lone ms", "deliver ms", "p99", "ticket ms")
    print(" ".join(f"{head:>12}" for head in heads))
    rows: list[dict[str, float]] = []
    for engines, tokens in cases:
        with tempfile.TemporaryDirectory() as folder:
            row = asyncio.run(_measure(Path(folder), engines, tokens, seconds))
        rows.append(row)
        shown = ("deliveries_per_s", "tickets_per_s", "cpu_ms_per_delivery", "lone_delivery_cpu_ms")
        shown += ("deliver_median_ms", "deliver_p99_ms", "ticket_median_ms")
        print(f"{engines:12} {tokens:12}", *(f"{row[name]:12.2f}" for name in shown), flush=True)
    if options.plot:
        _plot(rows, options.plot)
    if options.json:
        costs = {
            f"queue, {row['engines']:,} engines, {row['tokens']:,} tokens: CPU ms a delivery": row[
                "cpu_ms_per_delivery"
            ]
            for row in rows
        }
        content = {"machine": machine(), "costs": costs, "seconds": seconds, "cases": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
