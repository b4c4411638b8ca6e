"""The real SGLang: ends by tokens and strings, rows beyond the tokenizer, and scaled positions, as transformers."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sglang_case as case
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from streamppo.rollout.engine import Completion, Sampling
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
KNOWN = 28
"""Tokens of the tokenizer; the model has 64 rows."""
STOP = ("ab", "c", "<one>")


def completions(folder: Path, made: Any, count: int, sampling: Sampling, *overrides: str) -> list[Completion]:
    async def complete() -> list[Completion]:
        engine = await case.engine(str(folder), case.tensors(made), *overrides)
        try:
            given = [np.array([3 + n % 24], np.int32) for n in range(count)]
            return await asyncio.gather(*(engine.generate(one, sampling) for one in given))
        finally:
            await engine.stop()

    return asyncio.run(complete())


def expected(made: Any, completion: Completion, first: int, known: int) -> np.ndarray:
    text = torch.from_numpy(np.concatenate([[first], completion.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits_TV = made(text).logits[0, :-1, :known].float()
    return logits_TV.log_softmax(-1).gather(-1, text[0, 1:, None])[:, 0].numpy()


def test_it_ends_at_tokens_and_strings_and_never_samples_what_the_tokenizer_does_not_have(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(Qwen2Config(**case.SHAPE, eos_token_id=None)).eval()
    made.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.9, "top_k": 2, "eos_token_id": [7]}')
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwx")
    tokenizer.add_tokens(["<one>"])
    tokenizer.save_pretrained(tmp_path)
    done = completions(tmp_path, made, 48, Sampling(120), f"rollout.stop={list(STOP)}")
    spelt, ends = Tokenizer(tmp_path), set[str]()
    for number, one in enumerate(done):
        assert one.tokens.max() < KNOWN
        np.testing.assert_allclose(one.logprobs, expected(made, one, 3 + number % 24, KNOWN), atol=case.CLOSE)
        names, before = spelt.texts(one.tokens.tolist()), spelt.spell(one.tokens[:-1].tolist())
        last = [end for end in (*STOP, "e") if spelt.spell(one.tokens.tolist()).endswith(end)] or [
            end for end in ("<eos>",) if names[-1] == end
        ]
        assert (one.finish == "stop") == bool(last) and (last or len(one.tokens) == 120)
        assert not any(end in before for end in (*STOP, "e", "<eos>")), "it ends with the first"
        ends.update(last)
    assert len(ends) > 2, ends


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_scaled_positions_are_those_of_transformers_up_to_the_last(rope: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {**case.SHAPE, "max_position_embeddings": 256}
    made = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=None, rope_scaling=rope)).eval()
    made.save_pretrained(tmp_path)
    for number, one in enumerate(completions(tmp_path, made, 6, Sampling(1000))):
        assert one.finish == "length" and len(one.tokens) >= 253, "SGLang ends two tokens before the context does"
        np.testing.assert_allclose(one.logprobs, expected(made, one, 3 + number, 64), atol=case.CLOSE)
