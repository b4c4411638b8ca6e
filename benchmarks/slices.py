"""Two ranks with rows of their own, and with rows that are cut in two (`learner.mesh.context`): seconds and memory.

python benchmarks/slices.py [--tokens 256 1024 4096] [--times 3] [--json out.json]

An update of 4 rows of so many tokens, all but one of them sampled, a row in each micro-batch. `peak` is the most memory
that a rank had in it, less what it had before.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.ranks import most_memory, of_ranks
from benchmarks.runs import machine
from streamppo.config import file as configfile
from streamppo.learner import loading, objective, optimizer, ulysses
from streamppo.learner.batch import pad
from streamppo.learner.update import Updater
from streamppo.types import Batch, Identity, Trajectory

MATH = Path(__file__).parent.parent / "configs" / "math.toml"
ROWS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
WAYS = {"rows of their own": 1, "rows cut in two": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**SHAPE, max_position_embeddings=max(options.tokens))).save_pretrained(folder)
        rows = [
            {"tokens": tokens, "way": way} | _median(of_ranks(update, 2, folder, tokens, context, options.times))
            for tokens in options.tokens
            for way, context in WAYS.items()
        ]
    print(json.dumps(rows, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _median(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in ranks) for name in ranks[0]}


def update(folder: str, tokens: int, context: int, times: int) -> dict[str, float]:
    """The median seconds of an update, after one that is not counted, and the most memory of one."""
    micro = f"learner.micro_batch_tokens={tokens}"
    config = configfile.load(MATH, ["learner.ranks=2", f"learner.mesh.context={context}", micro])
    slices = ulysses.slices_of("cpu", config.learner.mesh)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    trained = loading.load(config.model, folder, 1.0, mesh, slices=slices)
    chosen, adamw = objective.build(config), optimizer.adamw(trained, config)
    updater = Updater(trained, adamw, chosen, config, group=slices.apart())
    batch, seconds, peaks = pad(_batch(tokens)), list[float](), list[float]()
    for _ in range(1 + times):
        begin = time.perf_counter()
        with most_memory() as peak:
            updater.metrics(updater.update(batch))
            peaks.append(peak())
        seconds.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(seconds[1:]), "peak_mib": max(peaks)}


def _batch(tokens: int) -> Batch:
    generator, count = np.random.default_rng(0), tokens - 1
    rows = [
        Trajectory(
            identity=Identity(task="t", prompt=row, sample=0),
            actor="rollout-0",
            prompt_tokens=np.array([2], np.int32).tobytes(),
            tokens=generator.integers(2, SHAPE["vocab_size"], count).astype(np.int32).tobytes(),
            logprobs=np.full(count, -7, np.float32).tobytes(),
            versions=np.zeros(count, np.int32).tobytes(),
            mask=np.ones(count, np.bool_).tobytes(),
            finish="stop",
            reward=float(row % 2),
        )
        for row in range(ROWS)
    ]
    return Batch(version=0, min_version=0, trajectories=tuple(rows))


if __name__ == "__main__":
    main()
