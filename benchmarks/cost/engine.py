"""The embedded engine compared with transformers' batched `generate`: same weights, one thread, alternating.

python benchmarks/cost/engine.py --json engine.json [--no-peer] [--rounds 1]
python benchmarks/cost/engine.py --decoders --json decoders.json      our forward pass beside transformers' modules
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine
from streamppo.rollout.embedded.decoder import Decoder
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.fused_decoder import FusedDecoder
from streamppo.rollout.embedded.model_decoder import ModelDecoder
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.embedded.spans import Span
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


SIZES: dict[str, dict[str, Any]] = {
    "64": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64},
    "512": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 4096},
}
"""Models by their width: one like builtin:tiny, one of 23 million parameters."""
STEPS, HELD = 20, 64
"""Steps of a round, and the tokens of a row."""


def compare_decoders(rounds: int) -> list[dict[str, Any]]:
    """CPU ms of a step of `IN_FLIGHT` rows, and of their prefill, by the fused decoder and by transformers' modules."""
    torch.set_num_threads(1)
    rows = []
    for width, shape in SIZES.items():
        config = Qwen2Config(**shape, num_attention_heads=8, num_key_value_heads=2)
        tensors = {name: parameter.detach() for name, parameter in Qwen2ForCausalLM(config).named_parameters()}
        options: dict[str, Any] = {"rows": IN_FLIGHT, "dtype": torch.float32, "float32_head": True, "device": "cpu"}
        decoders = {
            "fused": FusedDecoder(config, tensors, **options),
            "modules": ModelDecoder(config, tensors, **options),
        }
        taken = defaultdict[str, list[float]](list)
        for _ in range(rounds):
            for name, decoder in decoders.items():
                for work, ms in _decoder_ms(decoder).items():
                    taken[f"{name} {work}"].append(ms)
        rows.append({"width": int(width)} | {name: round(statistics.median(ms), 2) for name, ms in taken.items()})
    return rows


def _decoder_ms(decoder: Decoder) -> dict[str, float]:
    every = torch.arange(IN_FLIGHT)
    full = torch.full((IN_FLIGHT,), HELD)
    decoder.reserve(HELD + STEPS + 1)
    begin = time.process_time()
    decoder.prefill(torch.ones(IN_FLIGHT, HELD, dtype=torch.int64), full, every, every)
    prefilled = time.process_time()
    for number in range(STEPS):
        decoder.step(torch.ones_like(every), full + number, [Span(0, IN_FLIGHT, HELD + STEPS)])
    return {"prefill": 1e3 * (prefilled - begin), "step": 1e3 * (time.process_time() - prefilled) / STEPS}


def main() -> None:
    """Measure, print a line for each case, and write them with the machine's description to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave transformers' generate out")
    parser.add_argument("--decoders", action="store_true", help="compare the two forward passes of the engine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = compare_decoders(options.rounds) if options.decoders else measure(options.rounds, options.peer)
    print(*map(json.dumps, rows), sep="\n")
    if options.json and options.decoders:
        options.json.write_text(json.dumps({"machine": machine(), "decoders": rows}, indent=1) + "\n")
    elif options.json:
        costs = {f"engine, {row['case']}: CPU us a token": row["engine_cpu_us_per_token"] for row in rows}
        options.json.write_text(json.dumps({"machine": machine(), "costs": costs, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
