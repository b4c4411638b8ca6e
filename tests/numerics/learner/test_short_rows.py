"""Attention of short rows: the hidden states and gradients of transformers' own, and only where rows are short."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from streamppo.config.model import Model
from streamppo.learner.attention import layers, short_rows
from streamppo.learner.attention.layers import Checkpointing
from streamppo.learner.model import load_policy

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SHAPE: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ROWS, WIDTH = 5, 11


def transformer(made: PretrainedConfig) -> torch.nn.Module:
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        # At transformers' own scale attention hardly tells tokens apart.
        torch.nn.init.normal_(parameter, std=0.3)
    return model.base_model


def computed(model: torch.nn.Module, arguments: Mapping[str, Tensor], width: int = WIDTH) -> list[Tensor]:
    """The hidden states, and the gradient of a sum of them with weights of their own for every parameter."""
    model.zero_grad()
    tokens = torch.randint(20, (ROWS, width), generator=torch.Generator().manual_seed(1))
    hidden = model(input_ids=tokens, use_cache=False, **arguments).last_hidden_state
    (hidden * torch.rand(hidden.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return [hidden.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def branches() -> dict[str, Tensor]:
    """What rows with several samples are told: who sees whom, and positions that begin again."""
    seen = torch.rand(ROWS, 1, WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) > 0.4
    position = torch.tensor([0, 1, 2, 3, 4, 3, 4, 5, 3, 4, 5]).expand(ROWS, WIDTH)
    return {"attention_mask": (seen | torch.eye(WIDTH, dtype=torch.bool)).tril(), "position_ids": position}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("arguments", [{}, branches()], ids=["alone", "with branches"])
def test_states_and_gradients_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, family: str, heads: int, arguments: dict[str, Tensor]
) -> None:
    model = transformer(FAMILIES[family](**SHAPE, num_key_value_heads=heads, head_dim=8))
    expected = computed(model, arguments)
    short_rows.prepare(model)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    for ours, theirs in zip(computed(model, arguments), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.parametrize("kind", ["offloaded", "full"])
def test_a_layer_that_is_computed_again_has_the_same_gradients(kind: Checkpointing) -> None:
    model: Any = transformer(Qwen2Config(**SHAPE, num_key_value_heads=2))
    short_rows.prepare(model)
    expected = computed(model, branches())
    layers.checkpoint_activations(model, kind)
    for ours, theirs in zip(computed(model, branches()), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def test_long_rows_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer(Qwen2Config(**SHAPE, num_key_value_heads=4))
    expected = computed(model, {}, short_rows.LONGEST + 1)
    short_rows.prepare(model)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(short_rows, "_Attention", None)
    for ours, theirs in zip(computed(model, {}, short_rows.LONGEST + 1), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("alone")
def test_an_attention_that_is_chosen_by_name_is_left_alone(folder: Path) -> None:
    def has_ours(**choice: Any) -> bool:
        config = Model(path=str(folder), dtype="float32", **choice)
        policy = load_policy.load(config, folder, 1.0, init_device_mesh("cpu", (1,)))
        return "forward" in policy.lm.base_model.layers[0].self_attn.__dict__

    assert has_ours()
    assert not has_ours(attention="sdpa")
    assert not has_ours(attention="eager")
