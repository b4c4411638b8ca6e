"""Rows of a head that are not tokens of the tokenizer: they are in no log-prob, no entropy and no gradient."""

import asyncio
from pathlib import Path
from typing import Any

import learner_case as case
import model_families as families
import numpy as np
import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import lm_head, load_policy, policy
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Completion, Sampling
from streamppo.tasks import tokenizer
from streamppo.tasks.tokenizer import character_tokenizer

KNOWN = 10
"""Tokens of the tokenizer."""


def rows_of(columns: int) -> PaddedBatch:
    padded = pad(case.batch())
    return padded._replace(inputs_BL=padded.inputs_BL % columns)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", ["Qwen3Moe", "Phi", "Granite"])
def test_scores_and_gradients_are_those_of_the_known_tokens_alone(tmp_path: Path, family: str) -> None:
    """Phi's head has a bias, Granite's a scale."""
    families.make(family, tmp_path)
    character_tokenizer("abcdefg").save_pretrained(tmp_path)
    trained = load_policy.load(
        case.config_of("model.attention=sdpa").model, tmp_path, 0.7, init_device_mesh("cpu", (1,))
    )
    rows = rows_of(KNOWN)
    scored = trained(rows, "policy")
    generator = torch.Generator().manual_seed(1)
    weights_2BT = torch.randn((2, *rows.mask_BT.shape), generator=generator) * rows.mask_BT
    (weights_2BT[0] * scored.logprobs_BT + weights_2BT[1] * scored.entropy_BT).sum().backward()

    own: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    loss = torch.zeros(())
    for row in range(len(rows.start_B)):
        start, width = int(rows.start_B[row]), int(rows.length_B[row])
        text_1L = rows.inputs_BL[row : row + 1, : start + width]
        logits_TK = own(text_1L, use_cache=False).logits[0, start - 1 : -1, :KNOWN].float() / 0.7
        log_p_TK = logits_TK.log_softmax(-1)
        logprobs_T, entropy_T = log_p_TK.gather(1, text_1L[0, start:, None])[:, 0], -(log_p_TK.exp() * log_p_TK).sum(-1)
        torch.testing.assert_close(scored.logprobs_BT[row, :width].detach(), logprobs_T.detach(), rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(scored.entropy_BT[row, :width].detach(), entropy_T.detach(), rtol=1e-4, atol=2e-5)
        loss = loss + (weights_2BT[0, row, :width] * logprobs_T + weights_2BT[1, row, :width] * entropy_T).sum()
    loss.backward()
    theirs = {name: one.grad for name, one in own.named_parameters() if one.grad is not None}
    for name, one in trained.lm.named_parameters():
        if one.grad is not None:
            scale = theirs[name].abs().max().item()
            torch.testing.assert_close(policy.local(one.grad), theirs[name], rtol=1e-3, atol=1e-4 * scale, msg=name)
    gradient_VD = policy.local(trained.lm.get_output_embeddings().weight.grad)
    if not own.config.tie_word_embeddings:
        assert not gradient_VD[KNOWN:].any() and gradient_VD[:KNOWN].any()


@pytest.mark.usefixtures("alone")
def test_a_head_of_known_tokens_alone_is_left_as_it_is_and_a_model_without_tokenizer_has_no_unknown_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lm_head.unknown_bias(tmp_path, 17, "cpu") is None
    character_tokenizer("abcdefg").save_pretrained(tmp_path)
    found_V = lm_head.unknown_bias(tmp_path, 17, "cpu")
    assert found_V is not None and found_V.tolist() == [0] * KNOWN + [lm_head.UNSAMPLED] * 7
    monkeypatch.setattr(tokenizer, "Tokenizer", None)
    assert lm_head.unknown_bias(tmp_path, KNOWN, "cpu") is None, "its own file is enough"


@pytest.mark.usefixtures("alone")
def test_engine_and_learner_agree_about_the_distribution(tmp_path: Path) -> None:
    case.save_model(tmp_path)
    character_tokenizer("abcdefg").save_pretrained(tmp_path)
    trained = load_policy.load(case.config_of().model, tmp_path, 1.0, init_device_mesh("cpu", (1,)))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tensors = {name: one.detach() for name, one in model.named_parameters()}
    unknown = tokenizer.unknown_ids(tmp_path, model.config.vocab_size)
    assert unknown and min(unknown) == KNOWN

    async def complete() -> list[Completion]:
        ends = EndTokens(unknown=unknown)
        engine = EmbeddedEngine(model.config, tensors, version=3, slots=4, max_total_tokens=64, ends=ends, seed=7)
        try:
            prompts = [np.array([n % KNOWN], np.int32) for n in range(12)]
            return await asyncio.gather(*(engine.generate(one, Sampling(20)) for one in prompts))
        finally:
            await engine.stop()

    padded = pad(case.batch())
    for number, done in enumerate(asyncio.run(complete())):
        assert done.tokens.max() < KNOWN
        inputs_1L = torch.tensor([[number % KNOWN, *done.tokens.tolist()]])
        one = padded._replace(
            inputs_BL=inputs_1L,
            start_B=torch.tensor([1]),
            length_B=torch.tensor([20]),
            mask_BT=torch.ones((1, 20), dtype=torch.bool),
        )
        with torch.no_grad():
            scored = trained(one, "policy").logprobs_BT[0].numpy()
        np.testing.assert_allclose(scored, done.logprobs, atol=1e-5, rtol=0)
