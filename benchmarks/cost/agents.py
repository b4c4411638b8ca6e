"""The latency of a request at the endpoint of agents, beside the bare engine; memory, and what is lost.

    python benchmarks/cost/agents.py --agents 256 --turns 10 --rounds 3 --json out.json

`--agents` agents, each a process of its own, talk at once for `--turns` turns with builtin:tiny. The bare engine
answers as many conversations of the same shape, whose coroutines are in its own process. Both take turns for `--rounds`
rounds in one process; the ratio is of the medians, and of the 99th percentiles, of all rounds together. All processes
share the machine's cores, so at the endpoint a request also waits for other agents' JSON and clients.

Lost are runs that failed, answers that nobody received, and tokens that an agent received and its trajectory has not.
Memory is the proportional set size of the actor's process and of all agents, at its highest in each round.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import runs
from benchmarks.lib.runs import machine, table
from benchmarks.lib.talking_agent import QUESTION
from streamppo.commands import standalone
from streamppo.commands.models import weights
from streamppo.config import file as configfile
from streamppo.config.sections import Config, model_path
from streamppo.errors import EnvironmentFailed
from streamppo.learner.model import tiny
from streamppo.rollout import build
from streamppo.rollout.engine import Engine, Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import Player
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt, turns

REPOSITORY = Path(__file__).parents[2]
PROMPT = "12+34="
LOOK_S = 1.0
"""Between two looks at the memory: each reads the maps of all processes."""


class Round(NamedTuple):
    """One round: seconds of it and of each request, tokens that were sampled, what was lost, and memory in MiB."""

    seconds: float
    requests: Sequence[float]
    tokens: int
    failed: int = 0
    undelivered: int = 0
    unseen: int = 0
    most_at_once: int = 0
    memory_mib: float = 0.0


def main() -> None:
    """Play all rounds, and print and write down what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=8, help="of one answer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    overrides = [
        f"environment.agent={REPOSITORY}/benchmarks/lib/talking_agent.py:run",
        f"environment.max_turns={options.turns}",
        f"environment.max_tokens={options.turns * (options.max_tokens + len(QUESTION))}",
        "environment.timeout_s=600",
        "reward={}",
        f"rollout.slots={options.agents}",
        f"rollout.max_tokens={options.max_tokens}",
        "model.tiny.max_steps=1",
    ]
    config = configfile.load(REPOSITORY / "configs" / "math.toml", overrides)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measured(config, Path(folder), options))
    print(table([{name: value for name, value in found.items() if name not in ("machine", "rounds")}]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if found["lost"] else 0)


async def measured(config: Config, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure rounds of agents and of the bare engine, in turns."""
    path = model_path(config, folder)
    tiny.make(config, Path(path))
    tokenizer = Tokenizer(path)
    made: dict[str, list[Round]] = {"bare": [], "agents": []}
    async with standalone.engine(config, "load", path, 0, weights.model_weights(path, config.model.dtype)) as engine:
        player = Player(engine, tokenizer, config.environment, build.stop(config, path, tokenizer))
        sampling = build.sampling(config)
        try:
            for number in range(options.rounds + 1):
                bare = await of_engine(engine, tokenizer, sampling, options)
                agents = await of_agents(player, sampling, options)
                print(f"round {number}: bare {bare.seconds:.1f} s, agents {agents.seconds:.1f} s", file=sys.stderr)
                # The first one starts the agents' processes.
                if number:
                    made["bare"].append(bare)
                    made["agents"].append(agents)
        finally:
            assert player.agents is not None
            await player.agents.close()
    return {"machine": machine(), **told(made, options)}


async def of_engine(engine: Engine, tokenizer: Tokenizer, sampling: Sampling, options: argparse.Namespace) -> Round:
    """Let the engine answer conversations of the same shape, without an endpoint."""
    taken, begin, tokens = list[float](), time.perf_counter(), 0
    first, question = (tokenizer.ids(Prompt(text=text, columns={})) for text in (PROMPT, QUESTION))

    async def talk() -> int:
        context, count = np.array(first, np.int32), 0
        for _ in range(options.turns):
            asked = time.perf_counter()
            done = await engine.generate(context, sampling)
            taken.append(time.perf_counter() - asked)
            count += len(done.tokens)
            context = np.concatenate([context, done.tokens, np.array(question, np.int32)])
        return count

    tokens = sum(await asyncio.gather(*(talk() for _ in range(options.agents))))
    return Round(time.perf_counter() - begin, taken, tokens)


async def of_agents(player: Player, sampling: Sampling, options: argparse.Namespace) -> Round:
    """Let agents talk, and look at their memory beside them."""
    prompt = Prompt(text=PROMPT, columns={"turns": options.turns})
    begin, taken = time.perf_counter(), list[float]()
    under_way, most, failed, undelivered, unseen, tokens = 0, 0, 0, 0, 0, 0
    looking = asyncio.create_task(watch_memory())

    async def play() -> None:
        nonlocal under_way, most, failed, undelivered, unseen, tokens
        under_way += 1
        most = max(most, under_way)
        try:
            episode: Episode = await player.play(prompt, sampling)
        except EnvironmentFailed as error:
            print(error, file=sys.stderr)
            failed += 1
            return
        finally:
            under_way -= 1
        taken.extend(float(one) / 1e3 for one in episode.end.explanation.split())
        seen = int(episode.end.components["tokens"])
        tokens += seen
        unseen += abs(episode.num_sampled - seen)
        undelivered += turns.undelivered(episode.placed_turns)

    await asyncio.gather(*(play() for _ in range(options.agents)))
    seconds = time.perf_counter() - begin
    looking.cancel()
    (memory,) = await asyncio.gather(looking)
    return Round(seconds, taken, tokens, failed, undelivered, unseen, most, memory)


async def watch_memory() -> float:
    """Look at the memory of this process and of those below it until cancelled; the most of it in MiB."""
    most = 0.0
    try:
        while True:
            most = max(most, await asyncio.to_thread(runs.memory_mib, os.getpid()))
            await asyncio.sleep(LOOK_S)
    except asyncio.CancelledError:
        return max(most, runs.memory_mib(os.getpid()))


def told(made: dict[str, list[Round]], options: argparse.Namespace) -> dict[str, Any]:
    """Write down the numbers of all rounds."""
    percentiles = {
        name: np.percentile([1e3 * taken for one in rounds for taken in one.requests], [50, 99]).round(1).tolist()
        for name, rounds in made.items()
    }
    agents = made["agents"]
    rounds = {
        name: [{key: value for key, value in one._asdict().items() if key != "requests"} for one in found]
        for name, found in made.items()
    }
    (bare_50, bare_99), (agents_50, agents_99) = percentiles["bare"], percentiles["agents"]
    return {
        "agents": options.agents,
        "turns": options.turns,
        "requests": sum(len(one.requests) for one in agents),
        "bare_ms_p50": bare_50,
        "bare_ms_p99": bare_99,
        "agents_ms_p50": agents_50,
        "agents_ms_p99": agents_99,
        "ratio_p50": round(agents_50 / bare_50, 2),
        "ratio_p99": round(agents_99 / bare_99, 2),
        "requests_per_s": round(sum(len(one.requests) for one in agents) / sum(one.seconds for one in agents), 1),
        "most_at_once": max(one.most_at_once for one in agents),
        "memory_mib": [round(one.memory_mib) for one in agents],
        "lost": sum(one.failed + one.undelivered + one.unseen for one in agents),
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
