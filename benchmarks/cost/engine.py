"""The embedded engine compared with transformers' batched `generate`: same weights, one thread, alternating.

python benchmarks/cost/engine.py --json engine.json [--no-peer] [--rounds 1]
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Sampling

IN_FLIGHT = 64
PROMPT = 6
ROUNDS = 3


def measure(rounds: int = ROUNDS, peer: bool = True) -> list[dict[str, Any]]:
    """Tokens/s for equal lengths, for lengths uniform in 1..64, and for lengths uniform in 1..4."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=15,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).eval()
    generator = np.random.default_rng(0)
    cases = {
        "all 64 tokens": np.full(512, 64),
        "uniform in 1..64 tokens": generator.integers(1, 65, 2048),
        "uniform in 1..4 tokens": generator.integers(1, 5, 4096),
    }
    return [_measure(name, model, lengths, rounds, peer) for name, lengths in cases.items()]


def _measure(name: str, model: Any, lengths: np.ndarray, rounds: int, peer: bool) -> dict[str, Any]:
    tokens = int(lengths.sum())
    ours, theirs, cpu_s = [], [], []
    for _ in range(rounds):
        begin = time.process_time()
        ours.append(tokens / _ours(model, lengths))
        cpu_s.append(time.process_time() - begin)
        if peer:
            theirs.append(tokens / _theirs(model, lengths))
    row = {
        "case": name,
        "in_flight": IN_FLIGHT,
        "engine_tokens_per_s": round(statistics.median(ours)),
        "engine_cpu_us_per_token": 1e6 * statistics.median(cpu_s) / tokens,
    }
    if peer:
        row["generate_tokens_per_s"] = round(statistics.median(theirs))
        row["ratio"] = round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2)
    return row


def _ours(model: Any, lengths: np.ndarray) -> float:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    prompt = np.full(PROMPT, 3, np.int32)

    async def generate() -> float:
        engine = EmbeddedEngine(
            model.config, tensors, version=0, slots=IN_FLIGHT, max_total_tokens=128, ends=EndTokens(), seed=0
        )
        await engine.generate(prompt, Sampling(2))
        begin = time.perf_counter()
        await asyncio.gather(*(engine.generate(prompt, Sampling(int(length))) for length in lengths))
        seconds = time.perf_counter() - begin
        await engine.stop()
        return seconds

    return asyncio.run(generate())


def _theirs(model: Any, lengths: np.ndarray) -> float:
    """Generate batches of `IN_FLIGHT` sequences; each batch runs to its longest length, which is known beforehand."""
    begin = time.perf_counter()
    for start in range(0, len(lengths), IN_FLIGHT):
        batch = lengths[start : start + IN_FLIGHT]
        prompts = torch.full((len(batch), PROMPT), 3)
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=int(batch.max()),
            do_sample=True,
            top_k=0,
        )
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print a line for each case, and write them with the machine's description to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave transformers' generate out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.rounds, options.peer)
    print(*map(json.dumps, rows), sep="\n")
    if options.json:
        costs = {f"engine, {row['case']}: CPU us a token": row["engine_cpu_us_per_token"] for row in rows}
        options.json.write_text(json.dumps({"machine": machine(), "costs": costs, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
