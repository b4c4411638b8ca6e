"""Compare the real SGLang on a CPU with the embedded engine. Run it in SGLang's environment:

$(python tests/environments/build.py sglang) -W ignore -m benchmarks.gpu.real_sglang --output FILE.json
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.lib import runs
from streamppo.config import file as configfile
from streamppo.rollout import build
from streamppo.rollout.engine import Sampling

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "configs" / "math-sglang.toml"
IN_FLIGHT = (1, 8, 32, 64)
PROMPT, NEW, ROUNDS, SWAPS = 16, 64, 5, 20
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _model(dtype: torch.dtype, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made: Any = Qwen2ForCausalLM(Qwen2Config(**SHAPE, initializer_range=0.1))
    return made.to(dtype).eval()


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


async def _measure(kind: str, dtype: str) -> dict[str, Any]:
    """One engine's log-prob difference to transformers, time of in-flight swaps, and tokens/s."""
    model = _model(getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = configfile.load(CONFIG, [f"rollout.engine.kind={kind}", "rollout.slots=64", f"model.dtype={dtype}"])
        begin = time.perf_counter()
        engine = await build.engine(config, "bench", folder, 0, _tensors(model))
    start_s = time.perf_counter() - begin
    prompts = np.random.default_rng(0).integers(2, 64, (64, PROMPT)).astype(np.int32)
    try:
        speed = {count: await _speed(engine, prompts[:count]) for count in IN_FLIGHT}
        worst = await _difference(engine, model, prompts)
        swap_ms = await _swap_ms(engine, prompts, getattr(torch, dtype))
    finally:
        await engine.stop()
    return {
        "engine": kind,
        "dtype": dtype,
        "start_s": round(start_s, 1),
        "max_logprob_difference": worst,
        "swap_ms": round(swap_ms, 1),
        "tokens_per_s": speed,
    }


async def _speed(engine: Any, prompts: np.ndarray) -> int:
    """Median tokens/s over rounds in which all `prompts` are completed concurrently."""
    seen = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        await asyncio.gather(*(engine.generate(prompt, Sampling(NEW)) for prompt in prompts))
        seen.append(len(prompts) * NEW / (time.perf_counter() - begin))
    return round(statistics.median(seen))


async def _difference(engine: Any, model: Any, prompts: np.ndarray) -> float:
    """The largest difference between log-probs of the engine and of transformers with a float32 head."""
    worst = 0.0
    for prompt, done in zip(
        prompts, await asyncio.gather(*(engine.generate(prompt, Sampling(NEW)) for prompt in prompts)), strict=True
    ):
        text = torch.from_numpy(np.concatenate([prompt, done.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            hidden = model.model(text).last_hidden_state[0, PROMPT - 1 : -1]
            logp = F.linear(hidden.float(), model.lm_head.weight.float()).log_softmax(-1)
        expected = logp.gather(-1, text[0, PROMPT:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - done.logprobs).max()))
    return worst


async def _swap_ms(engine: Any, prompts: np.ndarray, dtype: torch.dtype) -> float:
    """Median time of a swap, attestation included, while 16 completions are under way."""
    pushed, seen = [_tensors(_model(dtype, seed)) for seed in (1, 2)], []
    for version in range(1, SWAPS + 1):
        running = [asyncio.ensure_future(engine.generate(prompt, Sampling(NEW))) for prompt in prompts[:16]]
        await asyncio.sleep(0.02)
        begin = time.perf_counter()
        await engine.update_weights(version, pushed[version % 2])
        seen.append((time.perf_counter() - begin) * 1e3)
        await asyncio.gather(*running)
    return statistics.median(seen)


def _mismatch(kind: str, dtype: str, kv: str, updates: int) -> dict[str, Any]:
    """The mean and the largest mismatch of a short run's updates, in nats (contract 9)."""
    overrides = [f"rollout.engine.kind={kind}", f"rollout.engine.kv={kv}", f"model.dtype={dtype}"]
    done = runs.run(CONFIG, [*overrides, f"updates={updates}", "evaluation.prompts=64"])
    seen = [row["mismatch"] for row in done.updates if "mismatch" in row]
    return {
        "engine": kind,
        "dtype": dtype,
        "kv": kv,
        "mismatch_mean": statistics.mean(seen),
        "mismatch_max": max(seen),
        "updates": updates,
        "wall_s": round(done.summary["wall_s"]),
        "tokens_per_s": round(done.summary["engines"]["tokens_per_s"]),
        "peak_memory_mib": round(done.peak_memory_mib),
    }


def main() -> None:
    """Measure everything; print every row and write the file after it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--updates", type=int, default=10)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    machine = runs.machine()
    machine["versions"]["sglang"] = metadata.version("sglang")
    result: dict[str, Any] = {"machine": machine, "engines": [], "mismatch": []}

    def keep(table: str, row: dict[str, Any]) -> None:
        result[table].append(row)
        print(json.dumps(row), flush=True)
        if chosen.output:
            chosen.output.write_text(json.dumps(result, indent=2) + "\n")

    for kind in ("sglang", "embedded"):
        for dtype in ("float32", "bfloat16"):
            keep("engines", asyncio.run(_measure(kind, dtype)))
    for dtype, kv in (("float32", "recompute"), ("bfloat16", "recompute"), ("float32", "keep")):
        for kind in ("sglang", "embedded"):
            keep("mismatch", _mismatch(kind, dtype, kv, chosen.updates))


if __name__ == "__main__":
    main()
