"""The embedded engine against transformers: the same log-probs, whatever is admitted, moved, refilled or swapped."""

import asyncio
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from small_decoders import SMALL, disturbed, reference, tensors
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.embedded import parameters
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.fused_decoder import FusedDecoder
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.embedded.rows import REORDER
from streamppo.rollout.embedded.sampling import LARGE, Draws, SampledTokens, sample
from streamppo.rollout.embedded.spans import SHORT, Span, cost, move_long_rows_first
from streamppo.rollout.engine import Completion, Cuts, Sampling
from streamppo.weights import content as content_module
from streamppo.weights.content import hash_tensor

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama-llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)),
}


def make(name: str = "qwen2", seed: int = 0) -> Any:
    return disturbed(MODELS[name], seed)


def engine(model: Any, *, slots: int = 4, eos: int = 1, **options: Any) -> EmbeddedEngine:
    settings = {"version": 0, "max_total_tokens": 64, "ends": EndTokens({eos}), "seed": 7, **options}
    return EmbeddedEngine(model.config, tensors(model), slots=slots, **settings)


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(2, 37, int(generator.integers(1, 12))).astype(np.int32) for _ in range(count)]


def completions_of(
    model: Any, requests: Sequence[np.ndarray], samplings: Sequence[Sampling], **options: Any
) -> list[Completion]:
    """The completions of a new engine."""

    async def complete() -> list[Completion]:
        running = engine(model, **options)
        return await asyncio.gather(*(running.generate(p, s) for p, s in zip(requests, samplings, strict=True)))

    return asyncio.run(complete())


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_transformers_for_ragged_prompts_and_refilled_rows(name: str) -> None:
    model, requests = make(name), prompts(23)
    samplings = [Sampling(3 + n % 20) for n in range(len(requests))]
    completions = completions_of(model, requests, samplings)
    for prompt, sampling, done in zip(requests, samplings, completions, strict=True):
        np.testing.assert_allclose(done.logprobs, reference(model, prompt, done.tokens), atol=1e-5, rtol=0)
        stopped = 1 in done.tokens
        assert done.finish == ("stop" if stopped else "length")
        assert (done.tokens == 1).sum() == stopped and (not stopped or done.tokens[-1] == 1)
        assert stopped or len(done.tokens) == sampling.max_tokens


@pytest.mark.parametrize("long", [{9, 19, 29, 39}, {9}], ids=["four", "one in the middle"])
def test_long_completions_come_first_and_are_in_nobodys_way(long: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few long ones beside many short ones: two spans, long rows brought forward, and every log-prob as it was."""
    model, requests = make("qwen2"), prompts(140)
    samplings = [Sampling(110 if n in long else 5 + n % 4) for n in range(len(requests))]
    seen: list[list[Span]] = []

    def step(decoder: FusedDecoder, tokens_B: torch.Tensor, at_B: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        seen.append(spans)
        assert [row for span in spans for row in range(span.first, span.end)] == list(range(len(at_B)))
        assert all((at_B[span.first : span.end] < span.longest).all() for span in spans)
        _, cheapest = move_long_rows_first(at_B.numpy() + 1, 128)
        assert cost(spans) <= REORDER * cost(cheapest), "long ones come first where that pays"
        return as_it_is(decoder, tokens_B, at_B, spans)

    as_it_is = FusedDecoder.step
    monkeypatch.setattr(FusedDecoder, "step", step)
    completions = completions_of(model, requests, samplings, slots=20, max_total_tokens=128, ends=EndTokens())
    for prompt, sampling, done in zip(requests, samplings, completions, strict=True):
        np.testing.assert_allclose(done.logprobs, reference(model, prompt, done.tokens), atol=3e-5, rtol=0)
        assert len(done.tokens) == sampling.max_tokens
    divided = [spans for spans in seen if len(spans) == 2]
    assert divided, "long and short completions ran side by side"
    assert max(spans[1].longest for spans in divided) <= SHORT, "no short row attends to a long one's places"


def test_samples_of_a_prompt_that_are_admitted_together_share_its_prefill_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, (short, long, *_) = make("qwen2"), sorted(prompts(9), key=len)[::4]
    computed: list[int] = []
    real = FusedDecoder.prefill

    def counted(decoder: FusedDecoder, tokens_BP: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        computed.append(len(tokens_BP))
        return real(decoder, tokens_BP, *arguments)

    monkeypatch.setattr(FusedDecoder, "prefill", counted)
    requests = [long, short, short, long, short, long]
    completions = completions_of(model, requests, [Sampling(12)] * 6, slots=6, eos=36)
    assert len(short) < len(long) and sum(computed) == 2
    for prompt, done in zip(requests, completions, strict=True):
        np.testing.assert_allclose(done.logprobs, reference(model, prompt, done.tokens), atol=1e-5, rtol=0)
    assert len({done.tokens.tobytes() for done in completions}) == 6


def test_rows_of_one_prompt_get_the_bits_of_one_that_has_it_alone_and_rows_that_are_copied_exchange_theirs() -> None:
    model, tokens_BP, lengths_B = make("qwen2"), torch.tensor([[3, 4, 5], [6, 7, 0]]), torch.tensor([3, 2])

    def decoder() -> FusedDecoder:
        more: Any = {"dtype": torch.float32, "float32_head": True, "device": "cpu"}
        made = FusedDecoder(model.config, tensors(model), rows=6, **more)
        made.reserve(64)
        return made

    one, shared = decoder(), decoder()
    logits_BV = one.prefill(tokens_BP, lengths_B, torch.arange(2), torch.tensor([0, 1]))
    of = torch.tensor([1, 0, 1, 1])
    assert torch.equal(shared.prefill(tokens_BP, lengths_B, torch.arange(1, 1 + len(of)), of), logits_BV[of])
    assert torch.equal(shared.cache[:, 1:5], one.cache[:, of])
    for row, length in enumerate([3, 2]):
        alone = decoder()
        alone.prefill(tokens_BP[row : row + 1, :length], lengths_B[row : row + 1], torch.tensor([0]), torch.tensor([0]))
        torch.testing.assert_close(one.cache[:, row, :length], alone.cache[:, 0, :length], rtol=0, atol=1e-5)
    assert not shared.cache[:, [0, 5]].any(), "other rows stay as they are"
    before = shared.cache.clone()
    shared.copy(torch.tensor([2, 1]), torch.tensor([1, 2]), 2)
    assert torch.equal(shared.cache[:, [1, 2], :2], before[:, [2, 1], :2])
    shared.cache[:, [1, 2], :2] = before[:, [1, 2], :2]
    assert torch.equal(shared.cache, before), "nothing else was written"


@pytest.mark.parametrize("name", ["qwen2", "qwen2-tied"])
def test_the_float32_head_multiplies_in_float32_what_bfloat16_gives_it(name: str) -> None:
    model, tokens_BP = make(name), torch.tensor([[3, 4, 5], [6, 7, 8]])
    logits = {}
    for wide in (True, False):
        decoder = FusedDecoder(
            model.config,
            tensors(model),
            rows=4,
            dtype=torch.bfloat16,
            float32_head=wide,
            device="cpu",
        )
        decoder.reserve(64)
        logits[wide] = decoder.prefill(tokens_BP, torch.tensor([3, 3]), torch.arange(2), torch.tensor([0, 1]))
        assert decoder.parameters.embedding.dtype == torch.bfloat16
        rounded = torch.equal(logits[wide], logits[wide].bfloat16().float())
        assert rounded is not wide
    torch.testing.assert_close(logits[True].bfloat16().float(), logits[False], rtol=2**-7, atol=1e-6)


def test_log_probs_are_at_the_sampling_temperature() -> None:
    model, requests = make(), prompts(6)
    completions = completions_of(model, requests, [Sampling(8, temperature=0.5)] * 6)
    for prompt, done in zip(requests, completions, strict=True):
        np.testing.assert_allclose(done.logprobs, reference(model, prompt, done.tokens, 0.5), atol=1e-5, rtol=0)


def test_greedy_rows_take_the_best_token_beside_sampled_rows() -> None:
    model, requests = make(), prompts(8)
    samplings = [Sampling(12, temperature=float(n % 2)) for n in range(8)]
    completions = completions_of(model, requests, samplings)
    for prompt, sampling, done in zip(requests, samplings, completions, strict=True):
        np.testing.assert_allclose(done.logprobs, reference(model, prompt, done.tokens), atol=1e-5, rtol=0)
        if sampling.temperature == 0:
            ids = torch.from_numpy(prompt).long()[None]
            expected = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
            assert done.tokens.tolist() == expected[0, len(prompt) :].tolist()


def test_the_same_seed_gives_the_same_completions_and_another_seed_others() -> None:
    model, requests = make(), prompts(9)
    one, again, other = (completions_of(model, requests, [Sampling(9)] * 9, seed=seed) for seed in (7, 7, 8))
    assert [done.tokens.tolist() for done in one] == [done.tokens.tolist() for done in again]
    assert [done.tokens.tolist() for done in one] != [done.tokens.tolist() for done in other]


# --- swaps ---------------------------------------------------------------------------------------------------


async def _swapped_in_the_middle(kv: str) -> tuple[Any, Any, np.ndarray, Completion]:
    old, new = make(seed=0), make(seed=1)
    running = engine(old, kv=kv, eos=-1)
    prompt = prompts(1)[0]
    request = asyncio.create_task(running.generate(prompt, Sampling(40)))
    while running.usage().tokens < 5:
        await asyncio.sleep(0)
    await running.update_weights(1, tensors(new))
    assert running.version == 1
    return old, new, prompt, await request


def test_a_swap_in_the_middle_marks_every_token_with_the_weights_that_sampled_it() -> None:
    old, new, prompt, done = asyncio.run(_swapped_in_the_middle("recompute"))
    assert set(done.versions.tolist()) == {0, 1}
    assert (np.diff(done.versions) >= 0).all()
    first = int((done.versions == 0).sum())
    whole_old, whole_new = (reference(model, prompt, done.tokens) for model in (old, new))
    np.testing.assert_allclose(done.logprobs[:first], whole_old[:first], atol=1e-5, rtol=0)
    # A recomputed cache is that of the new weights alone.
    np.testing.assert_allclose(done.logprobs[first:], whole_new[first:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_completion_that_is_cut_goes_on_from_the_same_cache_and_hands_over_its_first_tokens(max_tokens: int) -> None:
    """Cuts by length, and before a swap if the first token would be a version old; the completions are those without
    cuts."""
    old, new = make(seed=0), make(seed=1)
    prompt = prompts(1)[0]

    async def scenario(cut: bool) -> tuple[list[Completion], Completion]:
        running, segments = engine(old, eos=-1), list[Completion]()
        cuts = Cuts(segments.append, max_tokens=max_tokens, max_age=1, share=1.0) if cut else None
        request = asyncio.create_task(running.generate(prompt, Sampling(40), cuts))
        while running.usage().tokens < 5:
            await asyncio.sleep(0)
        await running.update_weights(1, tensors(new))
        done = await request
        await running.stop()
        return segments, done

    segments, done = asyncio.run(scenario(cut=True))
    lengths = [len(one.tokens) for one in segments]
    swapped = int((done.versions == 0).sum())
    assert swapped in lengths, "all tokens of version 0 were handed over before the swap"
    assert lengths == sorted(set(lengths)) and lengths[-1] < len(done.tokens) == 40
    if max_tokens:
        assert len(lengths) > 3, "cut by length too"
        assert all(b - a >= max_tokens for a, b in itertools.pairwise(lengths) if b != swapped)
    else:
        assert lengths == [swapped]
    for one in segments:
        assert one.finish == "cut"
        assert (one.tokens == done.tokens[: len(one.tokens)]).all()
        assert (one.logprobs == done.logprobs[: len(one.tokens)]).all()
    first, without = asyncio.run(scenario(cut=False))
    assert not first
    both = min(swapped, int((without.versions == 0).sum()))
    assert both and (without.tokens[:both] == done.tokens[:both]).all()


def test_a_completion_of_which_nothing_is_old_is_not_cut_by_a_swap() -> None:
    old, new, segments = make(seed=0), make(seed=1), list[Completion]()

    async def scenario() -> None:
        running = engine(old, eos=-1)
        cuts = Cuts(segments.append, max_age=2, share=1.0)
        request = asyncio.create_task(running.generate(prompts(1)[0], Sampling(40), cuts))
        while running.usage().tokens < 5:
            await asyncio.sleep(0)
        await running.update_weights(1, tensors(new))
        await request
        await running.stop()

    asyncio.run(scenario())
    assert segments == []


def test_a_kept_cache_is_not_recomputed() -> None:
    _, new, prompt, done = asyncio.run(_swapped_in_the_middle("keep"))
    first = int((done.versions == 0).sum())
    difference = np.abs(done.logprobs[first:] - reference(new, prompt, done.tokens)[first:])
    assert difference.max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_do_not_fit_are_refused_by_name_and_the_old_ones_stay(name: str) -> None:
    async def scenario() -> None:
        model = make(name)
        running = engine(model)
        good = tensors(make(name, seed=1))
        with pytest.raises(WeightsError, match="lacks: stranger"):
            await running.update_weights(1, {**good, "stranger": torch.zeros(1)})
        for spoiled, tensor in good.items():
            with pytest.raises(WeightsError, match=spoiled):
                await running.update_weights(1, {**good, spoiled: tensor[:-1]})
            with pytest.raises(WeightsError, match=spoiled):
                await running.update_weights(1, {other: good[other] for other in good if other != spoiled})
        assert running.version == 0
        prompt = prompts(1)[0]
        done = await running.generate(prompt, Sampling(5))
        np.testing.assert_allclose(done.logprobs, reference(model, prompt, done.tokens), atol=1e-5, rtol=0)

    asyncio.run(scenario())


def test_a_push_that_is_not_held_as_it_was_sent_is_refused_by_name_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves: list[torch.Tensor] = []

    def after_damage(part: torch.Tensor, first: int = 0) -> int:
        """The hash of what is held; of the first keys, which come behind the queries, one bit has changed before."""
        if part.dim() == 4:
            halves.append(part)
        if len(halves) == 2 and part is halves[1]:
            part.view(torch.int32)[0, 0, 0, 1] ^= 1
        return hash_tensor(part, first)

    async def scenario() -> None:
        model, new = make(), make(seed=1)
        running, prompt = engine(model), prompts(1)[0]
        sent = {name: hash_tensor(tensor) for name, tensor in tensors(new).items()}
        wrong = sent | {"model.norm.weight": sent["model.norm.weight"] ^ 1}
        with pytest.raises(WeightsError, match=r"model.norm.weight differs from what was pushed \(1 tensors"):
            await running.update_weights(1, tensors(new), wrong)
        with monkeypatch.context() as patched:
            patched.setattr(content_module, "hash_tensor", after_damage)
            with pytest.raises(WeightsError, match=r"k_proj.weight differs from what was pushed \(1 tensors"):
                await running.update_weights(1, tensors(new), sent)
        done = await running.generate(prompt, Sampling(5))
        np.testing.assert_allclose(done.logprobs, reference(model, prompt, done.tokens), atol=1e-5, rtol=0)
        await running.update_weights(1, tensors(new), sent)
        done = await running.generate(prompt, Sampling(5))
        np.testing.assert_allclose(done.logprobs, reference(new, prompt, done.tokens), atol=1e-5, rtol=0)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("float32_head", [True, False])
def test_what_a_decoder_holds_is_every_tensor_bit_for_bit(name: str, float32_head: bool) -> None:
    model = make(name).to(torch.bfloat16)
    decoder = FusedDecoder(
        model.config,
        tensors(model),
        rows=1,
        dtype=torch.bfloat16,
        float32_head=float32_head,
        device="cpu",
    )
    held = list(parameters.views(decoder.parameters, tensors(model).keys(), decoder.head_width))
    assert {named for named, _ in held} == tensors(model).keys()
    for named, view in held:
        assert torch.equal(view.to(torch.bfloat16).reshape(tensors(model)[named].shape), tensors(model)[named]), named
    memory = sum(tensor.numel() for tensor in distinct(decoder.parameters))
    assert memory == sum(view.numel() for _, view in held), "no part of it is without a name"


def distinct(of: parameters.Parameters) -> list[torch.Tensor]:
    found = [of.embedding, of.norm, *([] if of.head is of.embedding else [of.head])]
    return found + [tensor for layer in of.layers for tensor in layer if tensor is not None]


def test_two_sets_of_memory_take_turns() -> None:
    async def scenario() -> None:
        running = engine(make())
        used = {running._decoder.parameters.layers[0].qkv.data_ptr()}
        for version in range(1, 6):
            await running.update_weights(version, tensors(make(seed=version)))
            used.add(running._decoder.parameters.layers[0].qkv.data_ptr())
        assert len(used) == 2

    asyncio.run(scenario())


def test_the_engine_decodes_while_the_weights_of_a_push_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, stage = threading.Event(), FusedDecoder.stage
    monkeypatch.setattr(FusedDecoder, "stage", lambda *arguments: (gate.wait(20), stage(*arguments))[1])

    async def scenario() -> None:
        gate.set()
        running = engine(make(), eos=-1)
        gate.clear()
        swap = asyncio.create_task(running.update_weights(1, tensors(make(seed=1))))
        done = await asyncio.wait_for(running.generate(prompts(1)[0], Sampling(20)), 10)
        assert set(done.versions.tolist()) == {0} and not swap.done()
        gate.set()
        await asyncio.wait_for(swap, 10)
        assert running.version == 1

    try:
        asyncio.run(scenario())
    finally:
        gate.set()


def test_a_push_is_copied_and_its_memory_may_change_afterwards() -> None:
    async def scenario() -> None:
        running, new, prompt = engine(make(), eos=-1), make(seed=1), prompts(1)[0]
        pushed = tensors(new)
        await running.update_weights(1, pushed)
        for tensor in pushed.values():
            tensor.fill_(float("nan"))
        done = await running.generate(prompt, Sampling(5))
        np.testing.assert_allclose(done.logprobs, reference(new, prompt, done.tokens), atol=1e-5, rtol=0)

    asyncio.run(scenario())


def test_a_cancelled_swap_harms_nobody_else() -> None:
    async def scenario() -> None:
        model, new = make(), tensors(make(seed=1))
        running = engine(model, eos=-1)
        request = asyncio.create_task(running.generate(np.full(2, 3, np.int32), Sampling(60)))
        while running.usage().tokens < 3:
            await asyncio.sleep(0)
        for bad in (new, {**new, "stranger": torch.zeros(1)}):
            swap = asyncio.create_task(running.update_weights(1, bad))
            for _ in range(3):
                await asyncio.sleep(0)
            swap.cancel()
        await asyncio.wait_for(running.update_weights(2, new), 10)
        assert running.version == 2
        assert len((await asyncio.wait_for(request, 10)).tokens) == 60

    asyncio.run(scenario())


def test_a_cancelled_swap_that_still_writes_changes_nothing_of_the_next() -> None:
    async def scenario() -> None:
        running, one, two = engine(make()), tensors(make(seed=1)), tensors(make(seed=2))
        begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
        write = running._decoder._write_tensors

        def slowly(into: Any, weights: Any) -> Iterator[tuple[str, int]]:
            for written in write(into, weights):
                yield written
                if weights is one:
                    begun.set()
                    may_go_on.wait(10)
            if weights is one:
                ended.set()

        running._decoder._write_tensors = slowly
        cancelled = asyncio.create_task(running.update_weights(1, one))
        await asyncio.to_thread(begun.wait, 10)
        cancelled.cancel()
        following = asyncio.create_task(running.update_weights(2, two))
        await asyncio.wait([following], timeout=0.2)
        may_go_on.set()
        await asyncio.wait_for(following, 10)
        assert await asyncio.to_thread(ended.wait, 10) and running.version == 2
        for name, view in parameters.views(running._decoder.parameters, two.keys(), running._decoder.head_width):
            assert torch.equal(view, two[name].reshape(view.shape)), name

    asyncio.run(scenario())


def test_swaps_asked_for_at_once_are_made_in_order() -> None:
    async def scenario() -> None:
        running = engine(make())
        seen: list[int] = []

        async def swap(version: int) -> None:
            await running.update_weights(version, tensors(make(seed=version)))
            seen.append(running.version)

        await asyncio.gather(*(swap(version) for version in (1, 2, 3)))
        assert seen == [1, 2, 3]

    asyncio.run(scenario())


# --- requests ------------------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_is_refused_and_a_long_completion_is_cut_at_the_end_of_its_row() -> None:
    async def scenario() -> None:
        running = engine(make(), max_total_tokens=16, eos=-1)
        with pytest.raises(ModelError, match="does not fit"):
            await running.generate(np.full(16, 3, np.int32), Sampling(4))
        with pytest.raises(ModelError, match="does not fit"):
            await running.generate(np.zeros(0, np.int32), Sampling(4))
        done = await running.generate(np.full(10, 3, np.int32), Sampling(50))
        assert (len(done.tokens), done.finish) == (6, "length")

    asyncio.run(scenario())


@pytest.mark.parametrize("token", [-1, 37, 2**31 - 1])
def test_a_token_outside_the_vocabulary_fails_its_own_request_alone(token: int) -> None:
    async def scenario() -> None:
        running = engine(make())
        bad, good = np.array([3, token], np.int32), prompts(1)[0]
        # Twice with the same array, as the samples of a prompt come.
        *refused, done = await asyncio.gather(
            *(running.generate(prompt, Sampling(4)) for prompt in (bad, bad, good)), return_exceptions=True
        )
        assert all(
            isinstance(one, ModelError) and "outside the model's vocabulary of 37 tokens" in str(one) for one in refused
        )
        assert isinstance(done, Completion)

    asyncio.run(scenario())


def test_a_cancelled_request_frees_its_row() -> None:
    async def scenario() -> None:
        running = engine(make(), slots=1, eos=-1)
        endless = asyncio.create_task(running.generate(np.full(2, 3, np.int32), Sampling(60)))
        while running.usage().tokens < 3:
            await asyncio.sleep(0)
        endless.cancel()
        done = await asyncio.wait_for(running.generate(np.full(2, 4, np.int32), Sampling(2)), 5)
        assert len(done.tokens) == 2
        assert running.usage().tokens < 60

    asyncio.run(scenario())


def test_weights_that_have_diverged_fail_every_request_instead_of_hanging() -> None:
    async def scenario() -> None:
        running = engine(make())
        broken = {name: tensor * torch.nan for name, tensor in tensors(make()).items()}
        await running.update_weights(1, broken)
        results = await asyncio.gather(
            *(running.generate(prompt, Sampling(5)) for prompt in prompts(6)), return_exceptions=True
        )
        assert all(isinstance(result, ModelError) and "not finite" in str(result) for result in results)
        with pytest.raises(ModelError):
            await running.generate(prompts(1)[0], Sampling(5))

    asyncio.run(scenario())


@pytest.mark.parametrize("passes", range(0, 40, 3))
def test_stopping_at_any_moment_cancels_every_waiting_call(passes: int) -> None:
    async def scenario() -> None:
        running = engine(make(), slots=3)
        asked = [asyncio.create_task(running.generate(prompt, Sampling(30))) for prompt in prompts(12)]
        asked.append(asyncio.create_task(running.update_weights(1, tensors(make()))))
        for _ in range(passes):
            await asyncio.sleep(0)
        await running.stop()
        _, hanging = await asyncio.wait(asked, timeout=5)
        assert not hanging
        assert all(task.cancelled() or task.exception() is None for task in asked)
        for late in (running.generate(prompts(1)[0], Sampling(3)), running.update_weights(2, tensors(make()))):
            with pytest.raises(asyncio.CancelledError):
                await late

    asyncio.run(scenario())


# --- sampling ------------------------------------------------------------------------------------------------


def nucleus(logp_V: torch.Tensor, top_p: float, top_k: int) -> list[int]:
    """The tokens that are left, in plain Python: the best top_k, and of these the best until top_p is reached."""
    order = sorted(range(len(logp_V)), key=lambda token: -logp_V[token].item())[: top_k or len(logp_V)]
    share = [math.exp(logp_V[token].item()) for token in order]
    left = [token for n, token in enumerate(order) if sum(share[:n]) / sum(share) < top_p]
    return sorted(left)


def test_every_token_names_its_candidates_beside_rows_that_are_not_cut() -> None:
    model, requests = make(), prompts(16)
    knobs = [(0.8, 0), (1.0, 0), (0.7, 6), (1.0, 3), (1e-6, 0), (1.0, 37)]
    samplings = [Sampling(9 + n % 7, 0.0 if n == 1 else 1.3, *knobs[n % 6]) for n in range(len(requests))]
    sizes: set[int] = set()
    for prompt, sampling, done in zip(requests, samplings, completions_of(model, requests, samplings), strict=True):
        assert (done.candidates is not None) is sampling.excludes_tokens
        if done.candidates is None:
            continue
        ids = torch.from_numpy(np.concatenate([prompt, done.tokens])).long()[None]
        with torch.no_grad():
            logp_TV = (model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / 1.3).log_softmax(-1)
        sets = np.split(done.candidates.tokens, done.candidates.counts.cumsum()[:-1])
        assert len(sets) == len(done.tokens)
        for t, (token, some) in enumerate(zip(done.tokens.tolist(), sets, strict=True)):
            expected = nucleus(logp_TV[t], sampling.top_p, sampling.top_k)
            assert some.tolist() == ([] if len(expected) == 37 else expected)
            among = logp_TV[t, expected].log_softmax(-1)[expected.index(token)].item()
            assert done.logprobs[t] == pytest.approx(among, abs=1e-5)
            sizes.add(len(some))
    assert {0, 1, 3} < sizes


def drawn(logits_V: torch.Tensor, count: int, **knobs: float) -> SampledTokens:
    logits_BV = logits_V.expand(count, -1)
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **knobs}
    draws = Draws(*(torch.full((count,), value) for value in values.values()))
    draws = draws._replace(top_k_B=draws.top_k_B.long()) if knobs else None
    return sample(logits_BV, draws, torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("knobs", "allowed"),
    [({}, 5), ({"temperature": 0.5}, 5), ({"top_k": 2}, 2), ({"top_p": 0.6}, 2), ({"top_p": 1e-6}, 1)],
)
def test_tokens_are_drawn_from_the_distribution_that_their_log_probs_are_of(
    knobs: dict[str, float], allowed: int
) -> None:
    p_V = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    kept = p_V.topk(allowed).indices
    expected_V = torch.zeros(5).index_add_(0, kept, p_V[kept] ** (1 / knobs.get("temperature", 1.0)))
    expected_V /= expected_V.sum()
    tokens_B, logprobs_B, inside_BV = drawn(p_V.log() + 3.0, 40_000, **knobs)
    assert inside_BV is None or inside_BV.sum(-1).tolist() == [allowed] * 40_000
    frequency_V = tokens_B.bincount(minlength=5) / len(tokens_B)
    torch.testing.assert_close(frequency_V, expected_V, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs_B.exp(), expected_V[tokens_B], atol=1e-5, rtol=0)


# --- a large vocabulary --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [LARGE + 1, 151_936])
def test_of_a_large_vocabulary_the_token_is_the_one_of_a_sum_over_all_of_it(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_BV = torch.randn(64, vocabulary, generator=generator) * 3
    # The end of a vocabulary is often no token.
    logits_BV[:, -300:] = -torch.inf
    uniform_B = torch.rand(64, dtype=torch.float64, generator=generator)
    uniform_B[:4] = torch.tensor([1e-300, 1 - 2.0**-53, 0.5, 1e-9], dtype=torch.float64)
    drawn = sample(logits_BV, None, uniform_B)
    below_BV = logits_BV.log_softmax(-1).double().exp().cumsum(-1)
    row_B = torch.arange(64)
    below_B, total_B = below_BV[row_B, drawn.tokens_B], below_BV[:, -1]
    p_B = drawn.logprobs_B.double().exp()
    assert (p_B > 0).all(), "no token is drawn that is none"
    # Sums in float32 of 512 probabilities move each bound by 1e-6 of what lies before it.
    assert (below_B > uniform_B * total_B - 1e-6).all() and (below_B - p_B < uniform_B * total_B + 1e-6).all()
    assert torch.equal(drawn.logprobs_B, logits_BV.log_softmax(-1)[row_B, drawn.tokens_B])


def test_in_a_large_vocabulary_a_rare_token_is_drawn_as_often_as_its_probability_says() -> None:
    """Beside a token of probability 1 in the same block, in float32, and in a block of its own."""
    for rare in (7, LARGE):
        logits_BV = torch.full((2, LARGE + 1), -100.0)
        logits_BV[:, 5], logits_BV[:, rare] = 0.0, math.log(1e-12)
        uniform_B = torch.tensor([1 - 2e-12, 1 - 5e-13], dtype=torch.float64)
        assert sample(logits_BV, None, uniform_B).tokens_B.tolist() == [5, rare]


def test_logits_of_a_large_vocabulary_that_are_not_finite_are_refused() -> None:
    for wrong in (torch.nan, torch.inf):
        logits_BV = torch.zeros(2, LARGE + 1)
        logits_BV[1, 3] = wrong
        with pytest.raises(ModelError, match="not finite"):
            sample(logits_BV, None, torch.full((2,), 0.5, dtype=torch.float64))
