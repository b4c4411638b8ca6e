"""RMS norms on a CPU: the values and gradients of transformers' norms, only for the families with this norm."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import learner_case as case
import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaModel
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from streamppo.learner.attention import layers
from streamppo.learner.model import load_policy, norms

FAMILIES = {"llama": (LlamaConfig, LlamaModel), "qwen2": (Qwen2Config, Qwen2Model), "qwen3": (Qwen3Config, Qwen3Model)}
SHAPE: dict[str, Any] = {**case.SMALL, "head_dim": 8, "rms_norm_eps": 1e-3}


def transformer(family: str) -> Any:
    settings, model = FAMILIES[family]
    torch.manual_seed(4)
    made = model(settings(**SHAPE)).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    return made


def computed(model: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    tokens = torch.randint(17, (3, 7), generator=torch.Generator().manual_seed(1))
    hidden = model.to(dtype)(input_ids=tokens, use_cache=False).last_hidden_state
    (hidden.float() * torch.rand(hidden.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return [hidden.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours, calls = transformer(family), transformer(family), 0
    apply = norms._RMSNorm.apply

    def counted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        return apply(*arguments)

    monkeypatch.setattr(norms._RMSNorm, "apply", counted)
    norms.prepare(ours)
    for one, other in zip(computed(ours, torch.float32), computed(theirs, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * other.abs().max().item())
    assert calls == 1 + SHAPE["num_hidden_layers"] * (4 if family == "qwen3" else 2)


def test_gradients_are_the_slopes_of_values() -> None:
    torch.manual_seed(2)
    given = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.rand(5, dtype=torch.float64) + 0.5
    weight = given[1].requires_grad_()
    assert torch.autograd.gradcheck(norms._RMSNorm.apply, (given[0], weight, 1e-3))


def test_torchs_kernel_for_gpus_rounds_less_than_transformers_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    x_NC, weight_C = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((500, 64), (64,)))
    theirs = LlamaRMSNorm(64, eps=1e-5).bfloat16()
    theirs.weight.data.copy_(weight_C)
    exact_NC = x_NC.double() * (x_NC.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight_C.double()
    made_NC = torch.nn.functional.rms_norm(x_NC, weight_C.shape, weight_C, 1e-5)
    ours, other = ((one.double() - exact_NC).norm() for one in (made_NC, theirs(x_NC)))
    assert ours < 0.8 * other < 0.02 * exact_NC.norm()


def test_in_bfloat16_the_norm_on_a_cpu_is_transformers_own() -> None:
    theirs, ours = transformer("llama"), transformer("llama")
    norms.prepare(ours)
    for one, other in zip(computed(ours, torch.bfloat16), computed(theirs, torch.bfloat16), strict=True):
        assert torch.equal(one, other)


def test_a_family_with_another_norm_keeps_it() -> None:
    model = GemmaModel(GemmaConfig(**SHAPE))
    before = deepcopy(model)
    norms.prepare(model)
    assert not any("forward" in vars(module) for module in model.modules())
    for one, other in zip(computed(model, torch.float32), computed(before, torch.float32), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("alone")
def test_the_learner_uses_it_on_a_cpu_unless_layers_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.save_model(tmp_path)
    monkeypatch.setattr(layers, "compile_layers", lambda _: None)
    for compiled in (False, True):
        config = case.config_of(f"model.compile={str(compiled).lower()}", "learner.exact=false").model
        policy = load_policy.load(config, tmp_path, 1.0, case.mesh_of("cpu", case.config_of().learner.mesh))
        norm: Any = policy.lm.model.norm
        assert ("forward" in vars(norm)) is not compiled
