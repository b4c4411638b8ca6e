"""The embedded engine as a configuration builds it: its ends, its vocabulary, its positions and its cache."""

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MATH
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from streamppo.config import file as configfile
from streamppo.errors import ModelError
from streamppo.rollout import build, positions
from streamppo.rollout.embedded import decoder
from streamppo.rollout.embedded.fused_decoder import FusedDecoder
from streamppo.rollout.engine import Completion, Sampling
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "pad_token_id": None,
}
ROWS = 40
"""Rows of the vocabulary; the tokenizer of `folder_of` has fewer."""


def folder_of(folder: Path, *added: str, **settings: Any) -> Any:
    """A model of `ROWS` rows, with a tokenizer of 24 characters, three specials and those `added`, in `folder`."""
    torch.manual_seed(3)
    made = Qwen2ForCausalLM(Qwen2Config(**{**SMALL, "vocab_size": ROWS, "max_position_embeddings": 4096, **settings}))
    made.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwx")
    tokenizer.add_tokens(list(added))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return made.eval()


def completions(folder: Path, count: int, *overrides: str, length: int = 200, sampling: Any = None) -> list[Completion]:
    """Completions of one token each, by the engine that the configuration builds on a model's folder."""
    config = configfile.load(MATH, [f"model.path={folder}", "rollout.slots=32", *overrides])

    async def complete() -> list[Completion]:
        engine = await build.engine(config, "rollout-0", str(folder), 0, pushed(folder))
        try:
            chosen = sampling or Sampling(length)
            return await asyncio.gather(*(engine.generate(prompt(n), chosen) for n in range(count)))
        finally:
            await engine.stop()

    return asyncio.run(complete())


def prompt(number: int, length: int = 1) -> np.ndarray:
    return np.full(length, 3 + number % 24, np.int32)


def pushed(folder: Path) -> dict[str, torch.Tensor]:
    model = Qwen2ForCausalLM.from_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def logprobs(model: Any, before: np.ndarray, tokens: np.ndarray, known: Sequence[int]) -> np.ndarray:
    """What transformers says about `tokens`, among those that are `known`."""
    ids = torch.from_numpy(np.concatenate([before, tokens])).long()[None]
    with torch.no_grad():
        logits_TV = model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1].float()
    outside = torch.tensor([one not in known for one in range(logits_TV.shape[1])])
    logp_TV = logits_TV.masked_fill(outside, -torch.inf).log_softmax(-1)
    return logp_TV.gather(-1, ids[0, len(before) :, None]).squeeze(-1).numpy()


@pytest.mark.parametrize("sampling", [Sampling(40), Sampling(40, 0.7), Sampling(40, 1.0, 0.9, 30), Sampling(40, 0.0)])
def test_rows_beyond_the_tokenizer_are_never_sampled_and_count_in_no_log_prob(
    tmp_path: Path, sampling: Sampling
) -> None:
    model = folder_of(tmp_path)
    known = range(27)
    assert Tokenizer(tmp_path).unknown_ids(ROWS) == tuple(range(27, ROWS))
    for number, done in enumerate(completions(tmp_path, 24, sampling=sampling)):
        assert done.tokens.max() < 27
        if sampling == Sampling(40):
            expected = logprobs(model, prompt(number), done.tokens, known)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-5, rtol=0)


def test_a_token_that_is_added_or_stands_between_others_is_known_by_its_id(tmp_path: Path) -> None:
    folder_of(tmp_path, "<one>", "<two>")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (moved,) = [token for token in content["added_tokens"] if token["content"] == "<two>"]
    moved["id"] = 33
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    unknown = Tokenizer(tmp_path).unknown_ids(ROWS)
    numbers = Tokenizer(tmp_path).numbers()
    assert {*unknown} == {*range(ROWS)} - {*numbers.values()} and numbers["<one>"] not in unknown
    sampled = np.concatenate([done.tokens for done in completions(tmp_path, 24)])
    assert not {*sampled.tolist()} & {*unknown}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strings", [("ab", "c"), ("qx",), ("<one>b", "ddd")])
def test_a_string_ends_a_completion_behind_the_token_that_completes_it(
    tmp_path: Path, strings: tuple[str, ...]
) -> None:
    folder_of(tmp_path, "<one>")
    tokenizer = Tokenizer(tmp_path)
    done = completions(tmp_path, 64, f"rollout.stop={list(strings)}")
    for one in done:
        text = tokenizer.spell(one.tokens.tolist())
        found = [string for string in strings if string in text]
        assert (one.finish == "stop") == bool(found) and (found or len(one.tokens) == 200)
        before = tokenizer.spell(one.tokens[:-1].tolist())
        assert not any(string in before for string in strings), "it ends with the first"
    assert any(one.finish == "stop" for one in done)


def test_a_named_token_and_those_of_every_place_end_completions_and_the_log_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of(tmp_path, "<one>", eos_token_id=4)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "7"}')
    with caplog.at_level(logging.INFO):
        done = completions(tmp_path, 64, 'rollout.stop=["<one>"]')
    named = Tokenizer(tmp_path).numbers()["<one>"]
    assert {int(one.tokens[-1]) for one in done} == {4, 7, named}
    assert all(not {4, 7, named} & {*one.tokens[:-1].tolist()} for one in done)
    assert "completions end at b (4: model config), e (7: generation config), <one> (27: rollout.stop)" in caplog.text


def test_an_end_that_is_no_token_stops_the_start_in_a_sentence(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": {"a": 1}}')
    with pytest.raises(ModelError, match=r"generation config's eos_token_id has \{'a': 1\}, which is not a token"):
        completions(tmp_path, 1)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "eos_token_id": "</s>"}))
    config = configfile.load(MATH, [f"model.path={tmp_path}"])
    with pytest.raises(ModelError, match=r"cannot be loaded with its config\.json: .*'eos_token_id' with value '</s>'"):
        asyncio.run(build.engine(config, "rollout-0", str(tmp_path), 0, {}))


# --- the cache -----------------------------------------------------------------------------------------------


def test_the_cache_has_room_for_the_configurations_rows_and_grows_for_a_longer_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of 4,096: the configuration has 5 tokens behind prompts of 256 at most, and one has 300."""
    model, rooms = folder_of(tmp_path), list[int]()
    reserve = FusedDecoder.reserve

    def reserved(decoder: FusedDecoder, room: int) -> None:
        rooms.append(room)
        reserve(decoder, room)

    monkeypatch.setattr(FusedDecoder, "reserve", reserved)
    config = configfile.load(MATH, [f"model.path={tmp_path}", "rollout.slots=4"])
    requests = [prompt(n, length) for n, length in enumerate([5, 300, 7, 2, 9, 300, 250])]

    async def complete() -> list[Completion]:
        engine = await build.engine(config, "rollout-0", str(tmp_path), 0, pushed(tmp_path))
        try:
            return await asyncio.gather(*(engine.generate(one, Sampling(60)) for one in requests))
        finally:
            await engine.stop()

    for before, done in zip(requests, asyncio.run(complete()), strict=True):
        assert len(done.tokens) == 60
        expected = logprobs(model, before, done.tokens, range(27))
        np.testing.assert_allclose(done.logprobs, expected, atol=3e-5, rtol=0)
    assert rooms == [256 + 5, 360 + 90]


@pytest.mark.parametrize("environment", [True, False])
def test_turns_stay_in_the_cache_where_there_is_an_environment(tmp_path: Path, *, environment: bool) -> None:
    model = folder_of(tmp_path)
    calculator = ["environment.name=streamppo.tasks.library.calculator:Calculator", "environment.max_tokens=200"]
    config = configfile.load(MATH, [f"model.path={tmp_path}", *(calculator if environment else [])])

    async def scenario() -> None:
        engine = await build.engine(config, "rollout-0", str(tmp_path), 0, pushed(tmp_path))
        first = prompt(1, 50)
        done = await engine.generate(first, Sampling(9))
        second = np.concatenate([first, done.tokens, prompt(2, 3)])
        again = await engine.generate(second, Sampling(9))
        np.testing.assert_allclose(again.logprobs, logprobs(model, second, again.tokens, range(27)), atol=3e-5, rtol=0)
        assert engine.usage().reused == (50 + 9 - 1 if environment else 0)
        await engine.stop()

    asyncio.run(scenario())


def test_a_cache_that_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder_of(tmp_path, max_position_embeddings=2**40)
    with pytest.raises(
        ModelError, match=r"not enough memory for a cache of 32 completions of \d+ tokens, .* GiB: lower roll"
    ):
        completions(tmp_path, 1, f"rollout.max_tokens={2**38}")


# --- positions -----------------------------------------------------------------------------------------------

PLACES: dict[str, Any] = {**SMALL, "vocab_size": 37, "max_position_embeddings": 64}
ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {**ORIGINAL, "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3, 4, 5]}
YARN = {**ORIGINAL, "rope_type": "yarn", "rope_theta": 1e4, "attention_factor": 0.7, "beta_fast": 16, "beta_slow": 2}
SCALED: dict[str, Any] = {
    "linear": lambda: LlamaForCausalLM(LlamaConfig(**PLACES, rope_scaling={"type": "linear", "factor": 4.0})),
    "yarn": lambda: Qwen3ForCausalLM(Qwen3Config(**PLACES, head_dim=16, rope_parameters=YARN)),
    "dynamic": lambda: LlamaForCausalLM(LlamaConfig(**PLACES, rope_scaling={"rope_type": "dynamic", "factor": 4.0})),
    "longrope": lambda: LlamaForCausalLM(LlamaConfig(**PLACES, rope_scaling=LONGROPE)),
    "windows off": lambda: Qwen2ForCausalLM(Qwen2Config(**PLACES, use_sliding_window=False, sliding_window=8)),
    "windows in no layer": lambda: Qwen2ForCausalLM(
        Qwen2Config(**PLACES, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    ),
    "windows as long as rows": lambda: Qwen2ForCausalLM(
        Qwen2Config(**PLACES, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    ),
    "a window that llama does not have": lambda: LlamaForCausalLM(LlamaConfig(**PLACES, sliding_window=8)),
}


def saved(make: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    made = make().eval()
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("make", SCALED.values(), ids=SCALED)
def test_places_up_to_the_last_that_a_model_has_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    model = saved(make, tmp_path)
    config = configfile.load(MATH, [f"model.path={tmp_path}"])
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    requests = [np.arange(1, 3 + n, dtype=np.int32) for n in range(4)]

    async def complete() -> list[Completion]:
        engine = await build.engine(config, "rollout-0", str(tmp_path), 0, tensors)
        try:
            return await asyncio.gather(*(engine.generate(one, Sampling(100)) for one in requests))
        finally:
            await engine.stop()

    last = 16 if make is SCALED["longrope"] else 64
    for before, done in zip(requests, asyncio.run(complete()), strict=True):
        assert done.finish == "stop" or len(before) + len(done.tokens) == last
        expected = logprobs(model, before, done.tokens, range(37))
        np.testing.assert_allclose(done.logprobs, expected, atol=3e-5, rtol=0)


def test_windows_that_are_shorter_than_rows_are_refused_for_sglang_and_computed_by_the_embedded_engine() -> None:
    sliding = Qwen2Config(**PLACES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert positions.window(sliding) == 8
    assert "qwen2 attend to 8 tokens, but in SGLang to all of up to 20" in positions.refusal(sliding, 20)
    assert not positions.refusal(sliding, 8)
    assert [decoder.is_fused(sliding, room) for room in (1, 8, 9)] == [True, True, False]
    assert [decoder.row_limit(sliding, room) for room in (1, 8, 9)] == [8, 8, PLACES["max_position_embeddings"]]
    assert not decoder.refusal(sliding, 9)
    dynamic = LlamaConfig(**PLACES, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert "'dynamic', which SGLang scales" in positions.refusal(dynamic, 8)


def test_rows_within_a_window_end_with_it_and_longer_rows_of_the_configuration_pass_it(tmp_path: Path) -> None:
    """Rows of 256 + 5 tokens by the configuration, a window of 300 in a context of 4,096, and requests of up to 360."""
    window = {"use_sliding_window": True, "sliding_window": 300, "max_window_layers": 1}
    model = folder_of(tmp_path, **window)
    kept = completions(tmp_path, 6, length=360)
    assert {len(done.tokens) for done in kept} == {299}
    for number, done in enumerate(kept):
        expected = logprobs(model, prompt(number), done.tokens, range(27))
        np.testing.assert_allclose(done.logprobs, expected, atol=3e-5, rtol=0)
    beyond = completions(tmp_path, 2, "rollout.max_tokens=60", length=360)
    assert {len(done.tokens) for done in beyond} == {360}
    for number, done in enumerate(beyond):
        expected = logprobs(model, prompt(number), done.tokens, range(27))
        np.testing.assert_allclose(done.logprobs, expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize(
    ("scales", "alike"),
    [
        ({}, True),
        ({"attention_factor": 0.7}, False),
        ({"attention_factor": 0.1 * math.log(4.0) + 1}, True),
        ({"attn_factor": 0.7}, False),
        ({"attn_factor": 0.7, "attention_factor": 0.7 * (0.1 * math.log(4.0) + 1)}, True),
    ],
)
def test_a_scale_of_yarn_that_sglang_reads_otherwise_is_refused_by_its_names(
    scales: dict[str, float], alike: bool
) -> None:
    config = LlamaConfig(**PLACES, rope_scaling={"rope_type": "yarn", **ORIGINAL, **scales})
    refused = positions.refusal(config, 20)
    assert not refused if alike else "transformers reads only the former" in refused
