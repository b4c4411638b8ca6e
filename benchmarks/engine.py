"""The embedded engine beside its peer: transformers' batched `generate`, same weights, one thread, in turns.

python -m benchmarks.engine
"""

import asyncio
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.engine import Sampling

IN_FLIGHT = 64
PROMPT = 6
ROUNDS = 3


def beside_generate() -> list[dict[str, Any]]:
    """Tokens/s of both, for equal lengths, for lengths uniform in 1..64, and for answers of at most 4 tokens."""
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
    return [_compare(name, model, lengths) for name, lengths in cases.items()]


def _compare(name: str, model: Any, lengths: np.ndarray) -> dict[str, Any]:
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(int(lengths.sum()) / _ours(model, lengths))
        theirs.append(int(lengths.sum()) / _theirs(model, lengths))
    return {
        "case": name,
        "in_flight": IN_FLIGHT,
        "engine_tokens_per_s": round(statistics.median(ours)),
        "generate_tokens_per_s": round(statistics.median(theirs)),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
    }


def _ours(model: Any, lengths: np.ndarray) -> float:
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    prompt = np.full(PROMPT, 3, np.int32)

    async def generate() -> float:
        engine = EmbeddedEngine(
            model.config, tensors, version=0, slots=IN_FLIGHT, max_total_tokens=128, eos_ids=set(), seed=0
        )
        await engine.generate(prompt, Sampling(2))
        begin = time.perf_counter()
        await asyncio.gather(*(engine.generate(prompt, Sampling(int(length))) for length in lengths))
        seconds = time.perf_counter() - begin
        await engine.stop()
        return seconds

    return asyncio.run(generate())


def _theirs(model: Any, lengths: np.ndarray) -> float:
    """Batches of as many sequences; a batch lasts as long as its longest, whose length is known beforehand."""
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


if __name__ == "__main__":
    for row in beside_generate():
        print(json.dumps(row))
