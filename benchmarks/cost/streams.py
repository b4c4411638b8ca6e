"""The CPU time of streaming tokens out of SGLang, by the number of tokens per message.

    $(python tests/environments/build.py sglang) -W ignore -m benchmarks.cost.streams --json streams.json

An engine of configs/math-sglang.toml completes `COUNT` prompts concurrently, `TOKENS` tokens each, alternating between
the intervals; 0 means whole completions in one reply. Reported is the least CPU time per token in microseconds: in this
process, which acts as the rollout actor and holds SGLang's tokenizer manager, and in SGLang's other processes, which
also compute the model.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.torch import load_file

from benchmarks.lib import lengths
from benchmarks.lib.runs import machine, table
from streamppo.config import file as configfile
from streamppo.rollout import build
from streamppo.rollout.engine import Cuts, Sampling
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.engine import SGLangEngine
from streamppo.rollout.sglang.stream import CompletionStream

CONFIG = Path("configs/math-sglang.toml")
INTERVALS = (0, 1, 4, 8, 16, 32)
COUNT, TOKENS, ROUNDS = 32, 256, 3


def main() -> None:
    """Measure, print a table, and write it with the machine's description to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _, model = lengths.make_models(CONFIG, Path(folder))
        told = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**told, "eos_token_id": None}))
        rows = asyncio.run(_measure(model))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "runs": rows}, indent=1) + "\n")


async def _measure(model: Path) -> list[dict[str, Any]]:
    config = configfile.load(CONFIG, [f"rollout.slots={COUNT}"])
    engine = await build.engine(config, "rollout-0", str(model), 0, load_file(model / "model.safetensors"))
    assert isinstance(engine, SGLangEngine)
    spent: dict[int, list[tuple[float, float]]] = {interval: [] for interval in INTERVALS}
    for number in range(1 + ROUNDS):
        for interval in INTERVALS:
            ours, theirs = time.process_time(), _children()
            await asyncio.gather(*(_complete(engine, interval, f"{number}-{interval}-{n}") for n in range(COUNT)))
            cpu = time.process_time() - ours, _children() - theirs
            # The first round warms up.
            spent[interval] += [cpu] if number else []
    await engine.stop()
    per_token = 1e6 / (COUNT * TOKENS)
    return [
        {"interval": interval, "ours_us": min(ours) * per_token, "sglang_us": min(theirs) * per_token}
        for interval, rounds in spent.items()
        for ours, theirs in [zip(*rounds, strict=True)]
    ]


async def _complete(engine: SGLangEngine, interval: int, name: str) -> None:
    link, prompt = engine._session.link, np.arange(4, 12, dtype=np.int32)
    fields = wire.request(
        prompt, Sampling(TOKENS), room=TOKENS, eos_ids=[], rid=name, key="benchmark", interval=interval
    )
    if not interval:
        wire.completion(await link.call("generate", **fields), 0)
        return
    certain = asyncio.Event()
    certain.set()
    stream = CompletionStream(Cuts(lambda part: None, max_age=1), 0, certain, candidates=False)
    await stream.read(link.stream(**fields))
    stream.completion("keep")


def _children() -> float:
    """CPU seconds of all descendants of this process."""
    times = [child.cpu_times() for child in psutil.Process(os.getpid()).children(recursive=True)]
    return sum(one.user + one.system for one in times)


if __name__ == "__main__":
    main()
