"""Seconds and memory of two ranks under data, context, tensor and expert parallelism.

python benchmarks/cost/slices.py [--tokens 256 1024 4096] [--times 3] [--json out.json]

A dense model and a mixture of experts, with the values of `learner.mesh` that each supports. An update has 4 rows of
`--tokens` tokens, all but the first sampled, with one row per micro-batch. `peak` is a rank's peak memory during the
update, less its memory before.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.ranks import most_memory, of_ranks
from benchmarks.lib.runs import machine
from streamppo.config import file as configfile
from streamppo.learner.batch.padded import pad
from streamppo.learner.device import mesh_of
from streamppo.learner.model import load_policy, optimizer
from streamppo.learner.objective import objective
from streamppo.learner.parallel import context_parallel
from streamppo.learner.update import Updater
from streamppo.learner.update_metrics import update_metrics
from streamppo.types import Batch, Identity, Trajectory

MATH = Path(__file__).parents[2] / "configs" / "math.toml"
ROWS = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
EXPERTS: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "head_dim": 32}
WAYS = {
    "dense": ("context=1", "context=2", "tensor=2"),
    "mixture": ("context=1", "context=2", "tensor=2", "expert=2"),
}
"""Settings of `learner.mesh` for each model. With "context=1" each rank has its own rows (data parallelism)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, ways in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            _made(name, max(options.tokens)).save_pretrained(folder)
            for tokens, way in product(options.tokens, ways):
                found = of_ranks(update, 2, folder, tokens, way, options.times)
                rows.append({"model": name, "tokens": tokens, "way": way} | _median(found))
    print(json.dumps(rows, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def _made(name: str, longest: int) -> PreTrainedModel:
    shape: dict[str, Any] = SHAPE | {"max_position_embeddings": longest}
    if name == "dense":
        return Qwen2ForCausalLM(Qwen2Config(**shape, intermediate_size=1024))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **EXPERTS))


def _median(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in ranks) for name in ranks[0]}


def update(folder: str, tokens: int, way: str, times: int) -> dict[str, float]:
    """The median seconds of an update, after one uncounted update, and the peak memory of all."""
    micro = f"learner.micro_batch_tokens={tokens}"
    config = configfile.load(MATH, ["learner.ranks=2", f"learner.mesh.{way}", micro])
    slices = context_parallel.slices_of("cpu", config.learner.mesh)
    mesh = mesh_of("cpu", config.learner.mesh)
    trained = load_policy.load(config.model, folder, 1.0, mesh, slices=slices)
    chosen, adamw = objective.build(config), optimizer.adamw(trained, config)
    updater = Updater(trained, adamw, chosen, config, group=slices.data_ranks())
    batch, seconds, peaks = pad(_batch(tokens)), list[float](), list[float]()
    for _ in range(1 + times):
        begin = time.perf_counter()
        with most_memory() as peak:
            update_metrics(updater, updater.update(batch))
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
