"""The embedded engine by transformers' modules: families, windows, turns, swaps; the log-probs of a plain forward."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import learner_case
import model_families as families
import numpy as np
import pytest
import torch
from small_decoders import reference

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.embedded import decoder, model_decoder, prefixes, row_attention
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.model_decoder import ModelDecoder
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Completion, Sampling
from streamppo.rollout.weight_checks import Architecture
from streamppo.types import Ints
from streamppo.weights import content
from streamppo.weights.models.settings import settings

REFUSED = {
    "FalconH1": "a state besides keys and values",
    "Lfm2Vl": "layers of kind conv",
    "Qwen3Next": "a state besides keys and values",
    "Qwen3_5": "a state besides keys and values",
    "Qwen3_5Moe": "a state besides keys and values",
    "StableLm": "does not let others replace",
}
RELEASE = ("Nemotron",)
"""Families whose attention may be replaced in newer releases of transformers."""
NAMES = tuple(name for name in families.NAMES if name not in (*REFUSED, *RELEASE))
QUICK = ("GPT2", "Gemma2", "GptOss", "Olmo3", "Qwen3Moe")
"""Positions that are learned, a cap and windows, sinks, windows in all layers, experts; the others are slow."""
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
VOCABULARY = learner_case.SMALL["vocab_size"]
WINDOW = 8


def load(folder: Path) -> Any:
    """The model as transformers computes it by eager attention."""
    return families.read(folder, attn_implementation="eager")


def make(family: str, folder: Path, window: int | None = None) -> Any:
    """Write a model of three layers; with `window`, the layers that slide look back on so many tokens."""
    families.make(family, folder, layers=3)
    if window:
        config = settings(folder)
        config.sliding_window = window
        config.save_pretrained(folder)
    return load(folder)


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a push, which has no encoder of pictures."""
    pushed = Architecture(model.config).shapes
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if name in pushed}


def engine(model: Any, folder: Path, **options: Any) -> EmbeddedEngine:
    chosen = {"version": 0, "slots": 4, "max_total_tokens": 64, "ends": EndTokens({1}), "seed": 7, **options}
    return EmbeddedEngine(settings(folder), tensors(model), **chosen)


def prompts(count: int) -> list[Ints]:
    generator = np.random.default_rng(0)
    return [generator.integers(2, VOCABULARY, int(generator.integers(1, 12))).astype(np.int32) for _ in range(count)]


def check(model: Any, prompt: Ints, done: Completion) -> None:
    np.testing.assert_allclose(done.logprobs, reference(model, prompt, done.tokens), atol=5e-5, rtol=0)


async def finished(running: EmbeddedEngine, requests: Sequence[Ints], *, most: int = 20) -> list[Completion]:
    tasks = (running.generate(prompt, Sampling(3 + n % most)) for n, prompt in enumerate(requests))
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("family", EVERY)
def test_a_family_is_computed_as_by_transformers_in_refilled_rows_and_after_a_swap(
    family: str, kv: Any, tmp_path: Path
) -> None:
    model, later = make(family, tmp_path), load(tmp_path)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.mul_(1.1)

    async def scenario() -> None:
        running = engine(model, tmp_path, kv=kv)
        assert isinstance(running._decoder, ModelDecoder) is not (family in ("Llama", "Qwen3"))
        for prompt, done in zip(prompts(13), await finished(running, prompts(13)), strict=True):
            check(model, prompt, done)
        across = asyncio.gather(*(running.generate(prompt, Sampling(40)) for prompt in prompts(4)))
        await asyncio.sleep(0.05)
        await running.update_weights(1, tensors(later))
        for prompt, done in zip(prompts(4), await across, strict=True):
            first = int(np.searchsorted(done.versions, 1))
            check(model, prompt, done._replace(tokens=done.tokens[:first], logprobs=done.logprobs[:first]))
            if kv == "recompute":
                new = done._replace(tokens=done.tokens[first:], logprobs=done.logprobs[first:])
                check(later, np.concatenate([prompt, done.tokens[:first]]), new)
        for prompt, done in zip(prompts(5), await finished(running, prompts(5)), strict=True):
            check(later, prompt, done)
        await running.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3nText", "Gemma4Text", "GptOss", "Mistral"])
def test_rows_are_longer_than_a_sliding_window(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, window=WINDOW)
    requests = [np.tile(prompt, 3)[:20] for prompt in prompts(9)]

    async def scenario() -> None:
        running = engine(model, tmp_path)
        longest = 0
        for prompt, done in zip(requests, await finished(running, requests, most=30), strict=True):
            check(model, prompt, done)
            longest = max(longest, len(prompt) + len(done.tokens))
        assert longest > 2 * WINDOW
        await running.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("family", ["Gemma2", "GPT2", "Qwen3Moe"])
def test_a_turn_continues_the_row_of_its_context(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", 4)
    model = make(family, tmp_path, window=WINDOW)

    async def scenario() -> None:
        running = engine(model, tmp_path, max_total_tokens=120, ends=EndTokens(set()))
        running.reserve(120, turns=True)
        contexts = [prompt for prompt in prompts(3)]
        for turn in range(4):
            done = await asyncio.gather(*(running.generate(context, Sampling(6 + turn)) for context in contexts))
            for number, (context, completion) in enumerate(zip(contexts, done, strict=True)):
                check(model, context, completion)
                assert completion.cached > 0 or turn == 0
                observation = np.full(2 + number, 5, np.int32)
                contexts[number] = np.concatenate([context, completion.tokens, observation])
        await running.stop()

    asyncio.run(scenario())


def test_the_bits_of_a_dense_row_do_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    model = make("Gemma3Text", tmp_path)

    async def completions(count: int) -> Completion:
        running = engine(model, tmp_path, slots=24)
        samplings = [Sampling(20, seed=number) for number in range(count)]
        done = await asyncio.gather(*(running.generate(p, s) for p, s in zip(prompts(count), samplings, strict=True)))
        await running.stop()
        return done[0]

    alone, among = asyncio.run(completions(1)), asyncio.run(completions(24))
    assert alone.tokens.tolist() == among.tokens.tolist()
    assert alone.logprobs.tobytes() == among.logprobs.tobytes()


# --- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("float32_head", [True, False])
@pytest.mark.parametrize("family", ["Gemma2", "Phi", "tied Phi"])
def test_a_head_has_its_own_type_and_every_tensor_is_held_bit_for_bit(
    family: str, float32_head: bool, tmp_path: Path
) -> None:
    """Gemma ties its head to the embedding; Phi has a bias in it."""
    model = make(family.removeprefix("tied "), tmp_path)
    if family == "tied Phi":
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(tmp_path)
    held = ModelDecoder(
        settings(tmp_path), tensors(model), rows=2, dtype=torch.bfloat16, float32_head=float32_head, device="cpu"
    )
    head, embedding = held._model.get_output_embeddings(), held._model.get_input_embeddings()
    assert head.weight.dtype == (torch.float32 if float32_head else torch.bfloat16)
    assert embedding.weight.dtype == torch.bfloat16
    assert held._parameters.keys() == tensors(model).keys()
    for name, tensor in tensors(model).items():
        for parameter in held._parameters[name]:
            assert torch.equal(parameter.to(torch.bfloat16), tensor.to(torch.bfloat16)), name
    expected = model.to(torch.bfloat16).get_output_embeddings()
    assert torch.equal(head.weight.to(torch.bfloat16), expected.weight)


def test_a_write_that_fails_is_refused_by_name_and_the_old_version_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, later, last = make("Gemma2", tmp_path), load(tmp_path), load(tmp_path)
    with torch.no_grad():
        for factor, other in ((1.1, later), (1.2, last)):
            for parameter in other.parameters():
                parameter.mul_(factor)
    write, swallowed = content.write, "model.layers.1.mlp.up_proj.weight"

    async def scenario() -> None:
        running = engine(model, tmp_path)
        shape = tensors(model)[swallowed].shape

        def swallow(into: torch.Tensor, values: torch.Tensor) -> int:
            return content.hash_tensor(into) if into.shape == shape else write(into, values)

        for served, other in ((model, later), (later, last)):
            with monkeypatch.context() as patch:
                patch.setattr(model_decoder, "write", swallow)
                with pytest.raises(WeightsError, match="differs from what was pushed"):
                    await running.update_weights(running.version + 1, tensors(other))
            (done,) = await finished(running, prompts(1))
            check(served, prompts(1)[0], done)
            with pytest.raises(WeightsError, match=r"no tensor 'model.norm.weight'"):
                await running.update_weights(9, {n: t for n, t in tensors(other).items() if n != "model.norm.weight"})
            await running.update_weights(running.version + 1, tensors(other))
            (done,) = await finished(running, prompts(1))
            check(other, prompts(1)[0], done)
        assert running.version == 2
        await running.stop()

    asyncio.run(scenario())


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_the_cache_does_not_suit_is_refused(family: str, tmp_path: Path) -> None:
    families.make(family, tmp_path)
    reason = decoder.refusal(settings(tmp_path), 64)
    assert REFUSED[family] in reason and reason.endswith(": use another rollout.engine")
    with pytest.raises(ModelError, match=REFUSED[family]):
        engine(load(tmp_path), tmp_path)


@pytest.mark.parametrize("rule", ["cap", "sinks_H", "scale"])
def test_logits_that_are_not_the_models_are_refused_at_the_start(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("GptOss" if rule == "sinks_H" else "Gemma2", tmp_path)
    attention, lost = row_attention.attention, {"scale": 0.1}.get(rule)

    def without(*arguments: Any) -> torch.Tensor:
        *tensors_of, applied = arguments
        return attention(*tensors_of, applied._replace(**{rule: lost}))

    monkeypatch.setattr(row_attention, "attention", without)
    with pytest.raises(ModelError, match=r"does not compute a \w+ as transformers does: logits differ by"):
        engine(model, tmp_path)


def test_a_window_that_attention_is_not_told_of_is_refused(tmp_path: Path) -> None:
    """transformers' PhiMoE has its window in a mask alone: flash-attn would not have it either."""
    model = make("Phimoe", tmp_path, window=WINDOW)
    with pytest.raises(ModelError, match=r"phimoe models with a sliding window of 8 tokens, which transformers does"):
        engine(model, tmp_path)


def test_a_cache_that_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = make("Gemma2", tmp_path)
    held = ModelDecoder(
        settings(tmp_path), tensors(model), rows=2, dtype=torch.float32, float32_head=True, device="cpu"
    )
    with pytest.raises(ModelError, match=r"a cache of 2 completions of \d+ tokens, \d+\.\d GiB: lower rollout.slots"):
        held.reserve(2**40)
    assert held.room < math.inf
