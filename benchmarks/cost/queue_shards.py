"""Deliveries per second of a queue with and without shards, as actors, under thousands of simulated engines.

    python benchmarks/cost/queue_shards.py --json shards.json [--engines 4096] [--tokens 32000] [--shards 1 4]

The engines, which generate in no time, and the learner are coroutines of this process, as in queue_load.py. Queue and
shards are Ray actors, with journal, archive and object store, and with the learner's record of every token.

    per delivery    CPU milliseconds of the queue's process, and of the busiest shard
    could do        deliveries per second of the busiest process if it had a core to itself: the bound of the layout
    MB/s            delivered bytes, and the most bytes through a single process

With few cores, deliveries per second measure the speed of all processes together; the CPU time of each process hardly
depends on the number of cores.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cost.queue_load import (
    BATCH_TOKENS,
    PROMPT_TOKENS,
    SMALLEST_BATCH,
    VOCABULARY,
    Load,
    config_of,
    latencies,
    push,
)
from benchmarks.lib.runs import machine
from streamppo.config.sections import Config
from streamppo.driver.ray.actors import make_queue, make_shards
from streamppo.queue.shards.shards import Shards
from streamppo.types import TokenRecord, Trajectory, encode

BYTES_A_TOKEN = 13
"""Bytes of one completion token: its id, log-prob, version and mask."""
WARM_VERSIONS, WARM_S = 2, 120.0
FOLLOWERS = 64
"""Number of engines that swap to every version: here versions take seconds, in a run of such lengths minutes."""
STORE_BYTES = 6 * 2**30


class Called:
    """Wraps an actor's handle so that its methods are called without `.remote`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name).remote


class ShardedLoad(Load):
    """Engines that send their trajectories to `shards`, if there are any, and a learner that fetches every batch."""

    def __init__(self, queue: Any, engines: int, tokens: int, batch: int, shards: Shards) -> None:
        super().__init__(Called(queue), engines, tokens)
        self._batch, self._shards = batch, shards
        self.queue_bytes = 0

    async def deliver(self, name: str, version: int, made: tuple[Trajectory, ...]) -> None:
        """Deliver trajectories; with shards, store them there first and deliver their records."""
        given = encode(await self._shards.store(made) if self._shards else made)
        self.queue_bytes += len(given)
        await self.queue.deliver(name, version, given, encode(()))

    async def learn(self) -> None:
        """Take and fetch one batch after another, and publish each with a record of every token, forever."""
        while True:
            parts = await self.queue.take(self.version)
            fetched = await asyncio.to_thread(ray.get, parts)
            del fetched
            numbers = bytes(4 * self._batch * self.tokens)
            learned = encode(TokenRecord(values=numbers, advantages=numbers))
            told = [ray.put(learned)] if self._shards else learned
            await self.queue.publish(push(self.version + 1), [], told, 0)
            self.version += 1


async def _measure(folder: Path, engines: int, tokens: int, shards: int, seconds: float) -> dict[str, float]:
    batch = max(SMALLEST_BATCH, BATCH_TOKENS // tokens)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    config: Config = config_of(batch, tokens, f"queue.shards={shards}")
    actors = make_shards(config, folder)
    queue = make_queue(config, folder)
    made: list[Any] = [queue, *actors]
    processes = [psutil.Process(pid) for pid in ray.get([one.__ray_call__.remote(_pid) for one in made])]
    load = ShardedLoad(queue, engines, tokens, batch, Shards(actors))
    await load.queue.begin(0)
    await load.queue.publish(push(0), [], b"", 0)
    names = [f"engine-{number}" for number in range(engines)]
    tasks = [asyncio.create_task(load.sample(name)) for name in names]
    tasks += [asyncio.create_task(load.follow(name)) for name in names[:FOLLOWERS]]
    tasks.append(asyncio.create_task(load.learn()))
    with suppress(TimeoutError):
        async with asyncio.timeout(WARM_S):
            while load.version < WARM_VERSIONS:
                await asyncio.sleep(0.01)
    load.deliver_s.clear()
    load.ticket_s.clear()
    load.queue_bytes = 0
    begin, version, before = time.perf_counter(), load.version, [_cpu(one) for one in processes]
    await asyncio.sleep(seconds)
    wall, delivered = time.perf_counter() - begin, len(load.deliver_s)
    queue_ms, *shards_ms = (
        1e3 * (_cpu(one) - earlier) / max(1, delivered) for one, earlier in zip(processes, before, strict=True)
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    whole_mb = delivered / wall * (BYTES_A_TOKEN * tokens + 4 * PROMPT_TOKENS) / 1e6
    return {
        "engines": engines,
        "tokens": tokens,
        "shards": shards,
        "batch": batch,
        "deliveries_per_s": delivered / wall,
        "versions_per_s": (load.version - version) / wall,
        "queue_cpu_ms": queue_ms,
        "busiest_shard_cpu_ms": max(shards_ms, default=0.0),
        "could_do_per_s": 1e3 / max(queue_ms, *shards_ms, 1e-9),
        "mb_per_s": whole_mb,
        "queue_mb_per_s": load.queue_bytes / wall / 1e6,
        "most_mb_per_s": max(load.queue_bytes / wall / 1e6, whole_mb / shards),
        **latencies("deliver", load.deliver_s),
        **latencies("ticket", load.ticket_s),
    }


@contextmanager
def _ray() -> Generator[None]:
    """A separate Ray for each case, so that its waiting calls end with it."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES)
    try:
        yield
    finally:
        ray.shutdown()


def _pid(_: object) -> int:
    return os.getpid()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _line(row: dict[str, float], names: Sequence[str]) -> str:
    return " ".join(f"{row[name]:12.1f}" for name in names)


def main() -> None:
    """Measure every case, print a table, and write it with the machine's description to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2_000, 32_000])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shown = ("tokens", "shards", "deliveries_per_s", "mb_per_s", "most_mb_per_s", "queue_mb_per_s")
    shown += ("queue_cpu_ms", "busiest_shard_cpu_ms", "could_do_per_s", "ticket_p99_ms")
    print(" ".join(f"{name[:12]:>12}" for name in shown))
    rows: list[dict[str, float]] = []
    for tokens in options.tokens:
        for _ in range(options.repeats):
            for shards in options.shards:
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _ray():
                    made = _measure(Path(folder), options.engines, tokens, shards, options.seconds)
                    rows.append(asyncio.run(made))
                print(_line(rows[-1], shown), flush=True)
    medians = [
        {name: float(np.median([row[name] for row in rows if _is(row, tokens, shards)])) for name in shown}
        for tokens in options.tokens
        for shards in options.shards
    ]
    print("medians")
    for row in medians:
        print(_line(row, shown))
    if options.json:
        content = {"machine": machine(), "seconds": options.seconds, "medians": medians, "cases": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def _is(row: dict[str, float], tokens: int, shards: int) -> bool:
    return (row["tokens"], row["shards"]) == (tokens, shards)


if __name__ == "__main__":
    main()
