"""Compare log-probs of SGLang and of the learner on a mixture of experts, with the learner's and the engine's routes.

    $(python tests/environments/build.py sglang) -W ignore -m benchmarks.gpu.routing [--seeds 5] [--prompts 32]
        [--json out.json]

A random Qwen3 MoE model samples with SGLang, in bfloat16 and in float32; the learner has the same weights. Predicted
before any run: in bfloat16, replayed routes reduce the mean |learner - behavior| by at least half; in float32 they
change it by less than 1e-4.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.lib.runs import machine
from streamppo.algorithms.diagnostics import off_policy
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import load_policy
from streamppo.rollout import build
from streamppo.rollout.engine import Completion, Sampling
from streamppo.types import Batch, Identity, Trajectory

MATH = Path(__file__).parents[2] / "configs" / "math.toml"
TOKENS, PROMPT = 128, 32
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "eos_token_id": None,
    "bos_token_id": None,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [one for seed in range(options.seeds) for one in of_seed(seed, options.prompts)]
    for dtype in ("bfloat16", "float32"):
        for routes in ("own", "replayed"):
            some = [row for row in rows if (row["dtype"], row["routes"]) == (dtype, routes)]
            means = {name: statistics.mean(row[name] for row in some) for name in some[0] if name not in KEYS}
            shown = "  ".join(f"{name} {value:.3g}" for name, value in means.items())
            print(f"{dtype:9} {routes:9} {shown}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "shape": SHAPE, "rows": rows}, indent=1) + "\n")


KEYS = {"seed", "dtype", "routes"}


def of_seed(seed: int, prompts: int) -> list[dict[str, Any]]:
    """The measurements of one model, in both dtypes."""
    torch.manual_seed(seed)
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        for dtype in ("bfloat16", "float32"):
            given = ["rollout.engine.kind=sglang", "rollout.engine.routes=true", "rollout.slots=32"]
            config = configfile.load(MATH, [*given, f"model.dtype={dtype}", f"seed={seed}"])
            weights = {name: one.detach().to(getattr(torch, dtype)) for name, one in made.named_parameters()}
            batch = asyncio.run(sampled(config, folder, weights, prompts))
            rows += [{"seed": seed, "dtype": dtype, **one} for one in measured(config, folder, batch)]
    return rows


async def sampled(config: Config, folder: str, weights: dict[str, torch.Tensor], prompts: int) -> Batch:
    """One completion for each of `prompts` random prompts."""
    generator = np.random.default_rng(config.seed)
    texts = [generator.integers(0, SHAPE["vocab_size"], PROMPT).astype(np.int32) for _ in range(prompts)]
    engine = await build.engine(config, "rollout-0", folder, 0, weights)
    try:
        done = await asyncio.gather(*(engine.generate(text, Sampling(TOKENS)) for text in texts))
    finally:
        await engine.stop()
    rows = (_trajectory(number, *one) for number, one in enumerate(zip(texts, done, strict=True)))
    return Batch(version=0, min_version=0, trajectories=tuple(rows))


def _trajectory(number: int, prompt: np.ndarray, done: Completion) -> Trajectory:
    assert done.routes_SE is not None
    return Trajectory(
        identity=Identity(task="t", prompt=number, sample=0),
        actor="rollout-0",
        prompt_tokens=prompt.tobytes(),
        tokens=done.tokens.tobytes(),
        logprobs=done.logprobs.tobytes(),
        versions=done.versions.tobytes(),
        mask=np.ones(len(done.tokens), np.bool_).tobytes(),
        finish="length",
        reward=0.0,
        routes=done.routes_SE.tobytes(),
    )


def measured(config: Config, folder: str, batch: Batch) -> list[dict[str, Any]]:
    """The distance of the learner's log-probs from the engine's, with the learner's routes and with the engine's."""
    policy = load_policy.load(config.model, folder, config.rollout.temperature, init_device_mesh("cpu", (1,)))
    rows, found = pad(batch), list[dict[str, Any]]()
    for routes in ("own", "replayed"):
        policy.set_routes(replayed=routes == "replayed")
        with torch.no_grad():
            logprobs_BT = policy(rows, "policy").logprobs_BT
        far = off_policy(logprobs_BT, rows.behavior_logprobs_BT, rows.mask_BT, rows.lag_BT)
        distance_N = (logprobs_BT - rows.behavior_logprobs_BT)[rows.mask_BT].abs()
        told = policy.routers.metrics(torch.device("cpu"))
        found.append(
            {
                "routes": routes,
                "mismatch": distance_N.mean().item(),
                "p99": distance_N.quantile(0.99).item(),
                "k3": far.overall.k3,
                "ess_sequence": far.overall.ess_sequence,
                **({"routes_own": told["routes_own"]} if routes == "replayed" else {}),
            }
        )
    return found


if __name__ == "__main__":
    main()
