"""Turns on the embedded engine: the context is not computed again, and the completions are the same."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from small_decoders import SMALL, disturbed, reference, tensors
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from streamppo.rollout.embedded import prefixes
from streamppo.rollout.embedded import rows as rows_module
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.fused_decoder import FusedDecoder
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Completion, Sampling
from streamppo.types import Ints

LEAST_TOKENS = prefixes.LEAST_TOKENS


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of a test are short."""
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", 1)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama-yarn": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=YARN)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)),
}


def make(name: str = "qwen2", seed: int = 0) -> Any:
    return disturbed(MODELS[name], seed)


def engine(model: Any, *, slots: int = 4, turns: bool = True, **options: Any) -> EmbeddedEngine:
    settings: Any = {"version": 0, "max_total_tokens": 512, "ends": EndTokens(), "seed": 7, **options}
    made = EmbeddedEngine(model.config, tensors(model), slots=slots, **settings)
    made.reserve(1, turns=turns)
    return made


def text(count: int, seed: int) -> Ints:
    return np.random.default_rng(seed).integers(2, 37, count).astype(np.int32)


async def begun(running: EmbeddedEngine, prompt: Ints) -> asyncio.Task[Completion]:
    """Begin a long completion, and wait until three of its tokens are sampled."""
    task = asyncio.create_task(running.generate(prompt, Sampling(200)))
    begin = running.usage().tokens
    while running.usage().tokens < begin + 3:
        await asyncio.sleep(0)
    return task


def check(model: Any, prompt: Ints, done: Completion, atol: float = 3e-5) -> None:
    """The log-probs are those of a transformers forward of the whole sequence."""
    np.testing.assert_allclose(done.logprobs, reference(model, prompt, done.tokens), atol=atol, rtol=0)


def computed(running: EmbeddedEngine) -> int:
    """The tokens of prompts that were computed."""
    usage = running.usage()
    assert sum(usage.kv_ages.values()) == usage.reused, "each reused token has an age"
    return usage.prompted - usage.reused


async def episode(
    running: EmbeddedEngine, seed: int, turns: int, *, sampled: int = 6, observed: int = 4
) -> list[tuple[Ints, Completion]]:
    """Play turns of `sampled` tokens, each with an observation of `observed`; the prompt has as many as both."""
    context, played = text(sampled + observed, seed), list[tuple[Ints, Completion]]()
    for turn in range(turns):
        done = await running.generate(context, Sampling(sampled))
        played.append((context, done))
        await asyncio.sleep(0.001 * (seed % 3))
        context = np.concatenate([context, done.tokens, text(observed, 1000 * seed + turn)])
    return played


def checked(model: Any, played: Sequence[tuple[Ints, Completion]]) -> None:
    for prompt, done in played:
        check(model, prompt, done)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_twenty_equal_turns_cost_no_more_than_twenty_units_of_prefill(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit is a completion and its answer, as long as the prompt; computed anew they are 210 units."""
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", LEAST_TOKENS)
    model, unit = make(name), 40

    async def scenario(turns: bool) -> int:
        running = engine(model, turns=turns, max_total_tokens=1024)
        checked(model, await episode(running, 1, 20, sampled=10, observed=30))
        assert running.usage().prompted == 210 * unit
        return computed(running)

    assert asyncio.run(scenario(turns=False)) == 210 * unit
    # The prompt, and then 19 observations, each with the token before it, which was sampled and never fed.
    assert asyncio.run(scenario(turns=True)) == unit + 19 * (30 + 1) <= 20 * unit


@pytest.mark.parametrize("slots", [1, 3, 8, 24])
def test_episodes_beside_one_another_get_the_log_probs_of_a_fresh_prefill_in_any_number_of_rows(slots: int) -> None:
    """Rows are exchanged, moved, refilled and evicted; where each episode has a row, none of its turns is lost."""
    model = make()

    async def scenario() -> None:
        running = engine(model, slots=slots)
        tasks = [episode(running, seed, 5, sampled=3 + seed % 5, observed=1 + seed % 4) for seed in range(1, 13)]
        for played in await asyncio.gather(*tasks):
            checked(model, played)
        least = sum(3 + seed % 5 + 1 + seed % 4 + 4 * (2 + seed % 4) for seed in range(1, 13))
        assert computed(running) >= least
        if slots >= 12:
            assert computed(running) == least

    asyncio.run(scenario())


@pytest.mark.parametrize("pairs", [1, 700, 2**24])
def test_branches_of_a_context_are_computed_from_where_they_part_at_once_and_later(
    pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MOST_PAIRS", pairs)
    model = make()

    async def scenario() -> None:
        running = engine(model, slots=12)
        root = text(60, 1)
        first = await running.generate(root, Sampling(20))
        context = np.concatenate([root, first.tokens])
        # Some part before the end of the completion, as a template does that writes it in other words.
        asked = [np.concatenate([context[: 80 - n % 3], text(2 + n, 50 + n)]) for n in range(8)]
        begin = computed(running)
        done = await asyncio.gather(*(running.generate(prompt, Sampling(30 - n)) for n, prompt in enumerate(asked[:5])))
        done += await asyncio.gather(*(running.generate(prompt, Sampling(9)) for prompt in asked[5:]))
        for prompt, one in zip(asked, done, strict=True):
            check(model, prompt, one)
        assert computed(running) - begin <= sum(len(prompt) - 77 for prompt in asked)

    asyncio.run(scenario())


def test_a_context_of_1000_tokens_that_8_branches_share_is_computed_once() -> None:
    model = make()

    async def scenario(turns: bool) -> int:
        running = engine(model, slots=10, turns=turns, max_total_tokens=1100)
        root = text(1000, 1)
        first = await running.generate(root, Sampling(4))
        context = np.concatenate([root, first.tokens])
        asked = [np.concatenate([context, text(3, 10 + n)]) for n in range(8)]
        done = await asyncio.gather(*(running.generate(prompt, Sampling(4)) for prompt in asked))
        for prompt, one in zip(asked[::7], done[::7], strict=True):
            check(model, prompt, one)
        return computed(running)

    # Behind the context, each branch has the last sampled token, which was never fed, and three of its own.
    assert asyncio.run(scenario(turns=True)) == 1000 + 8 * 4
    assert asyncio.run(scenario(turns=False)) == 1000 + 8 * 1007


def test_a_branch_from_a_running_row_copies_what_it_shares() -> None:
    model = make()

    async def scenario() -> None:
        running = engine(model, slots=2)
        root = text(40, 1)
        first = await running.generate(root, Sampling(5))
        context = np.concatenate([root, first.tokens, text(3, 2)])
        long = await begun(running, context)
        before = computed(running)
        prompt = np.concatenate([context[:46], text(4, 3)])
        check(model, prompt, await running.generate(prompt, Sampling(5)))
        assert computed(running) - before == 4 and not long.done()
        check(model, context, await long)

    asyncio.run(scenario())


@pytest.mark.parametrize("sampled", [1, 2, 5])
@pytest.mark.parametrize("added", [0, 1, 2])
def test_a_turn_of_any_length_is_continued_by_an_observation_of_any_length(sampled: int, added: int) -> None:
    model = make()

    async def scenario() -> None:
        running = engine(model)
        root = text(8, 1)
        done = await running.generate(root, Sampling(sampled))
        prompt = np.concatenate([root, done.tokens, text(added, 2)])
        before = computed(running)
        check(model, prompt, await running.generate(prompt, Sampling(4)))
        assert computed(running) - before == 1 + added

    asyncio.run(scenario())


def test_prompts_in_rows_that_are_full_to_the_last_place_are_right() -> None:
    """A short continuation beside a long one is padded, and its padding reaches beyond the room."""
    model = make()

    async def scenario() -> None:
        running = engine(model, max_total_tokens=40)
        roots = [text(30, 1), text(6, 2)]
        done = await asyncio.gather(*(running.generate(root, Sampling(4)) for root in roots))
        prompts = [
            np.concatenate([root, one.tokens, text(more, 3)])
            for root, one, more in zip(roots, done, [5, 29], strict=True)
        ]
        for prompt, one in zip(
            prompts, await asyncio.gather(*(running.generate(prompt, Sampling(9)) for prompt in prompts)), strict=True
        ):
            assert len(one.tokens) == 1
            check(model, prompt, one)

    asyncio.run(scenario())


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside a running row"])
def test_a_swap_makes_rows_that_have_ended_stale_exactly_if_running_ones_are_recomputed(kv: str, others: bool) -> None:
    old, new = make(seed=0), make(seed=1)

    async def scenario() -> None:
        running = engine(old, kv=kv)
        root = text(10, 1)
        first = await running.generate(root, Sampling(6))
        prompt = np.concatenate([root, first.tokens, text(3, 2)])
        other = asyncio.create_task(running.generate(text(7, 3), Sampling(300))) if others else None
        while others and running.usage().tokens < 10:
            await asyncio.sleep(0)
        await running.update_weights(1, tensors(new))
        before = computed(running)
        second = await running.generate(prompt, Sampling(6))
        assert set(second.versions.tolist()) == {1}
        assert other is None or not other.done()
        assert computed(running) - before == (4 if kv == "keep" else len(prompt))
        assert second.cached == (15 if kv == "keep" else 0)
        assert running.usage().kv_ages.get(1, 0) == second.cached
        if kv == "recompute":
            check(new, prompt, second)
        else:
            with pytest.raises(AssertionError):
                check(new, prompt, second)
        await running.stop()

    asyncio.run(scenario())


def test_reused_tokens_are_counted_by_the_age_of_the_weights_that_computed_them() -> None:
    """A token of a completion is computed by the step that samples the next one."""
    model = make()

    async def scenario() -> None:
        running = engine(model)
        root = text(10, 1)
        long = await begun(running, root)
        await running.update_weights(4, tensors(model))
        first = await long
        fed = first.versions[1:]
        assert set(fed.tolist()) == {0, 4}
        context = np.concatenate([root, first.tokens])
        second = await running.generate(np.concatenate([context, text(3, 2)]), Sampling(6))
        assert second.cached == 10 + len(fed)
        old = 10 + int((fed == 0).sum())
        ages = {4: old, 0: int((fed == 4).sum())}
        assert {age: count for age, count in running.usage().kv_ages.items() if count} == ages
        await running.update_weights(5, tensors(model))
        third = np.concatenate([context, text(3, 2), second.tokens, text(2, 3)])
        assert (await running.generate(third, Sampling(2))).cached == second.cached + 4 + 5
        # What was reused once is as old as it is, and one version older.
        ages = {4: old, 0: ages[0], 5: old, 1: ages[0] + 4 + 5}
        assert {age: count for age, count in running.usage().kv_ages.items() if count} == ages
        await running.stop()

    asyncio.run(scenario())


def test_rows_that_a_swap_has_computed_again_are_as_young_as_the_swap() -> None:
    model = make()

    async def scenario() -> None:
        running = engine(model, kv="recompute")
        root = text(10, 1)
        long = await begun(running, root)
        await running.update_weights(4, tensors(model))
        first = await long
        done = await running.generate(np.concatenate([root, first.tokens, text(3, 2)]), Sampling(6))
        assert done.cached == 9 + len(first.tokens)
        assert {age for age, count in running.usage().kv_ages.items() if count} == {0}
        await running.stop()

    asyncio.run(scenario())


def test_samples_of_one_prompt_get_the_bits_that_they_get_without_turns() -> None:
    """In groups, and after groups of the same prompts have ended; some completions are the beginnings of others."""
    model = make()

    async def scenario(turns: bool) -> list[Completion]:
        running = engine(model, turns=turns, slots=5, ends=EndTokens({1, 2, 3}))
        asked = [text(3 + n // 8, n // 8) for n in range(40)]
        return await asyncio.gather(*(running.generate(prompt, Sampling(8)) for prompt in asked))

    plain, parked = asyncio.run(scenario(turns=False)), asyncio.run(scenario(turns=True))
    for one, other in zip(plain, parked, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes() and one.logprobs.tobytes() == other.logprobs.tobytes()


def test_without_turns_nothing_is_kept_and_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the default path extends no row")

    monkeypatch.setattr(FusedDecoder, "extend", refuse)
    model = make()

    async def scenario() -> None:
        running = engine(model, turns=False)
        checked(model, await episode(running, 1, 3))
        assert running.usage().reused == 0

    asyncio.run(scenario())


def test_short_contexts_are_computed_anew_with_the_bits_that_they_get_without_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefixes, "LEAST_TOKENS", LEAST_TOKENS)
    model = make()

    async def scenario(turns: bool) -> bytes:
        running = engine(model, turns=turns)
        played = await episode(running, 1, 3)
        assert running.usage().reused == 0
        return b"".join(done.logprobs.tobytes() for _, done in played)

    assert asyncio.run(scenario(turns=True)) == asyncio.run(scenario(turns=False))


def test_a_cancelled_turn_leaves_a_row_that_is_continued_rightly() -> None:
    model = make()

    async def scenario() -> None:
        running = engine(model, slots=2)
        root = text(10, 1)
        first = await running.generate(root, Sampling(6))
        prompt = np.concatenate([root, first.tokens, text(3, 2)])
        dead = await begun(running, prompt)
        dead.cancel()
        await asyncio.sleep(0.05)
        before = computed(running)
        check(model, prompt, await running.generate(prompt, Sampling(6)))
        assert computed(running) - before == 1, "only the last token of the prompt, for its logits"

    asyncio.run(scenario())
