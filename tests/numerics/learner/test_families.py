"""Models of many families: the learner scores tokens as they do, and its gradient is theirs."""

from pathlib import Path
from typing import Any

import fake_varlen
import learner_case as case
import model_families as families
import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from streamppo.errors import ModelError
from streamppo.learner import memory
from streamppo.learner.attention import attention as of_learner
from streamppo.learner.attention import varlen
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import load_policy, policy
from streamppo.weights.models.settings import read_settings

QUICK = ("Cohere2", "GPT2", "Gemma2", "GptOss", "Granite", "Phi", "Qwen3Moe", "Qwen3Next")
"""One for each kind of head and of place of layers; the others are slow."""


EAGER = ("Gemma2", "GptOss")
"""Families that SDPA computes otherwise, or does not compute."""


LEAKY = ("Afmoe", "FalconH1", "Lfm2Vl", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""Families that carry state from row to row where rows lie end to end."""


def is_end_to_end(family: str, folder: Path) -> bool:
    """True if torch's attention over rows end to end can be put into models of a family."""
    replaceable = getattr(varlen.model_class(read_settings(folder)), "_supports_attention_backend", False)
    return replaceable and family not in EAGER + LEAKY


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("end_to_end", [False, True])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in families.NAMES]
)
def test_scores_and_gradients_are_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, end_to_end: bool
) -> None:
    families.make(family, tmp_path)
    attention = "eager" if family in EAGER else "sdpa"
    config = case.config_of(f"model.attention={'auto' if end_to_end else attention}").model
    if end_to_end:
        fake_varlen.install(monkeypatch)
        monkeypatch.setattr(of_learner, "choose", lambda *_: varlen.register())
    trained = load_policy.load(config, tmp_path, 0.7, init_device_mesh("cpu", (1,)))
    chosen = trained.lm.config.get_text_config()._attn_implementation
    assert chosen == ("varlen" if end_to_end and is_end_to_end(family, tmp_path) else attention)
    rows = pad(case.batch())
    scored = trained(rows, "policy")
    weights_BT = torch.randn(rows.mask_BT.shape, generator=torch.Generator().manual_seed(1)) * rows.mask_BT
    (weights_BT * scored.logprobs_BT).sum().backward()

    own = families.read(tmp_path, attn_implementation=attention)
    loss = torch.zeros(())
    for row in range(len(rows.start_B)):
        start, width = int(rows.start_B[row]), int(rows.length_B[row])
        text_1L = rows.inputs_BL[row : row + 1, : start + width]
        log_p_LV = (own(text_1L, use_cache=False).logits[0].float() / 0.7).log_softmax(-1)[start - 1 : -1]
        logprobs_T = log_p_LV.gather(1, text_1L[0, start:, None])[:, 0]
        torch.testing.assert_close(scored.logprobs_BT[row, :width].detach(), logprobs_T.detach(), rtol=1e-4, atol=2e-5)
        loss = loss + (weights_BT[row, :width] * logprobs_T).sum()
    loss.backward()
    theirs = {name: one.grad for name, one in own.named_parameters() if one.grad is not None}
    found = {name: policy.local(one.grad) for name, one in trained.lm.named_parameters() if one.grad is not None}
    assert found.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item(), msg=name)


def _made(ranks: int, folder: Path) -> tuple[case.Weights, dict[str, float]]:
    load_policy.SHARD_LAYERS_ABOVE = 0
    return case.updated(folder, pad(case.batch()), f"learner.ranks={ranks}", "learner.minibatches=2")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["Llava", "Qwen3VL"])
def test_ranks_make_the_same_update_of_a_model_with_parts_that_are_not_trained(tmp_path: Path, family: str) -> None:
    families.make(family, tmp_path / "model")
    one, two = (case.by_ranks(_made, ranks, tmp_path, tmp_path / "model") for ranks in (1, 2))
    case.assert_same(one, two)
    before = dict(families.read(tmp_path / "model").named_parameters())
    names = {name.removeprefix("lm."): tensor for name, tensor in one[0].items() if name.startswith("lm.")}
    moved = {name for name, tensor in names.items() if not torch.equal(tensor, before[name])}
    assert moved and not any("multi_modal_projector" in name for name in moved)


@pytest.mark.usefixtures("alone")
def test_scores_of_attention_that_a_model_caps_are_capped_by_auto_and_sdpa_is_refused(tmp_path: Path) -> None:
    families.make("Gemma2", tmp_path / "capped")
    families.make("Llama", tmp_path / "plain")
    mesh, rows = init_device_mesh("cpu", (1,)), pad(case.batch())

    def load(model: str, choice: str, critic: str = "head") -> policy.Policy:
        config = case.config_of(f"model.attention={choice}").model
        return load_policy.load(config, tmp_path / model, 1.0, mesh, critic)

    found, expected = load("capped", "auto"), load("capped", "eager")
    with torch.no_grad():
        assert torch.equal(found(rows, "policy").logprobs_BT, expected(rows, "policy").logprobs_BT)
    assert load("plain", "auto").lm.config._attn_implementation == "sdpa"
    assert load("plain", "auto", str(tmp_path / "capped")).lm.config._attn_implementation == "eager"
    for model, critic in (("capped", "head"), ("plain", str(tmp_path / "capped"))):
        with pytest.raises(ModelError, match=r"caps the scores of its attention .* SDPA leaves out"):
            load(model, "sdpa", critic)


@pytest.mark.parametrize("family", ["FalconH1", "Qwen3", "Qwen3Next"])
def test_a_token_keeps_as_much_as_one_of_a_long_row(tmp_path: Path, family: str) -> None:
    """Layers that carry a state fill a row up to a chunk: a row of one token would keep a hundred times more."""
    families.make(family, tmp_path)
    settings = read_settings(tmp_path)
    with torch.device("meta"):
        made: Any = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    of_long_row, _ = memory._activations_in_rows(made.base_model, "layers", 1, 512)
    sizes = memory.sizes(settings, case.config_of("model.dtype=bfloat16").model)
    assert sizes.activations_per_layer == pytest.approx(of_long_row, rel=0.3)
