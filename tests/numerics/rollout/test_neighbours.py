"""A completion is a function of its prompt, its seed and the weights, bit for bit, whatever is decoded beside it."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch
from small_decoders import SMALL, disturbed, tensors
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from streamppo.rollout import random_numbers
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Completion, Sampling
from streamppo.types import Identity

MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)),
    "wide": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL | {"hidden_size": 384, "intermediate_size": 1536})),
}
COUNT = 16


def asked(seed: int, longest: int) -> list[tuple[np.ndarray, Sampling]]:
    """Prompts of all lengths, some of them equal, each with a seed of its own."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest, COUNT)
    prompts = [generator.integers(2, 37, int(length)).astype(np.int32) for length in lengths]
    prompts[1::4] = prompts[0::4]
    knobs: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3}]
    return [
        (prompt, Sampling(int(generator.integers(1, 40)), seed=random_numbers.seed_of(seed, one), **knobs[number % 4]))
        for number, prompt in enumerate(prompts)
        for one in (Identity(task="t", prompt=number, sample=0),)
    ]


async def completions(model: Any, requests: list[tuple[np.ndarray, Sampling]], slots: int) -> list[Completion]:
    engine = EmbeddedEngine(
        model.config, tensors(model), version=0, slots=slots, max_total_tokens=90, ends=EndTokens({1}), seed=slots
    )
    engine.reserve(90)
    try:
        return list(await asyncio.gather(*(engine.generate(*one) for one in requests)))
    finally:
        await engine.stop()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "longest"), [("qwen2", 12), ("qwen2", 50), ("qwen3", 50), ("wide", 12)])
def test_completions_are_the_same_bits_whatever_is_sampled_beside_them(name: str, longest: int) -> None:
    model, requests = disturbed(MODELS[name], 0), asked(3, longest)
    order = random.Random(0).sample(range(COUNT), COUNT)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = asyncio.run(completions(model, requests, 1))
        for slots in (5, COUNT):
            found = asyncio.run(completions(model, [requests[n] for n in order], slots))
            for n, one in zip(order, found, strict=True):
                assert one.tokens.tolist() == alone[n].tokens.tolist()
                assert one.logprobs.tobytes() == alone[n].logprobs.tobytes(), (
                    slots,
                    n,
                    one.logprobs - alone[n].logprobs,
                )
    finally:
        torch.set_num_threads(before)


def test_samples_of_one_prompt_and_attempts_at_it_are_different() -> None:
    identities = [
        Identity(task="t", prompt=7, sample=sample, attempt=attempt) for sample in (0, 1) for attempt in (0, 1)
    ]
    seeds = [random_numbers.seed_of(run, one) for run in (1, 2) for one in identities]
    turns = [random_numbers.seed_of_turn(seeds[0], turn) for turn in range(3)]
    assert len({*seeds, *turns}) == len(seeds) + len(turns) - 1 and turns[0] == seeds[0]


def test_random_numbers_are_uniform_and_of_no_two_tokens_alike() -> None:
    seeds = np.arange(400, dtype=np.uint64).repeat(100)
    found = random_numbers.uniform(seeds, np.tile(np.arange(100), 400))
    assert len(set(found)) == len(found) and 0 < found.min() < 1e-3 and 1 - 1e-3 < found.max() < 1
    assert np.histogram(found, 10, (0, 1))[0] == pytest.approx(4000, abs=250)
    neighbours = found.reshape(400, 100)
    assert abs(np.corrcoef(neighbours[:-1].ravel(), neighbours[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(neighbours[:, :-1].ravel(), neighbours[:, 1:].ravel())[0, 1]) < 0.02
