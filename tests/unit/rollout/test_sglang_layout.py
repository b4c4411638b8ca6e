"""Tensors of a model's files, laid side by side as SGLang keeps them."""

import pytest
import torch

from streamppo.rollout.sglang.layout import held_name, tensors_of_rank

AT = "model.layers.0."


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("model.layers.1.mlp.experts.12.up_proj.weight", "model.layers.1.mlp.experts.w13_weight"),
        ("model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.1.mlp.experts.w2_weight"),
        ("model.layers.1.block_sparse_moe.experts.0.w3.weight", "model.layers.1.block_sparse_moe.experts.w13_weight"),
        ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_tensors_are_found_behind_the_names_of_those_that_they_are_part_of(name: str, whole: str) -> None:
    assert held_name(name) == whole


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([[value, value] for value in values])


def test_parts_lie_in_sglangs_order_whatever_their_order_in_files() -> None:
    made = dict(
        tensors_of_rank(
            {
                f"{AT}mlp.up_proj.weight": rows(5, 6),
                f"{AT}self_attn.v_proj.bias": torch.tensor([3.0]),
                f"{AT}self_attn.k_proj.weight": rows(3),
                f"{AT}mlp.gate_proj.weight": rows(7, 8),
                f"{AT}self_attn.q_proj.weight": rows(1, 2),
                f"{AT}self_attn.v_proj.weight": rows(4),
                f"{AT}self_attn.q_proj.bias": torch.tensor([1.0]),
                f"{AT}self_attn.k_proj.bias": torch.tensor([2.0]),
                "model.norm.weight": torch.ones(2),
            }
        )
    )
    assert {name: one.flatten().tolist() for name, one in made.items()} == {
        f"{AT}mlp.gate_up_proj.weight": [7, 7, 8, 8, 5, 5, 6, 6],
        f"{AT}self_attn.qkv_proj.bias": [1, 2, 3],
        f"{AT}self_attn.qkv_proj.weight": [1, 1, 2, 2, 3, 3, 4, 4],
        "model.norm.weight": [1, 1],
    }


def test_experts_stand_side_by_side_in_the_order_of_their_numbers() -> None:
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        tensors = {f"{AT}mlp.experts.{n}.{down}.weight": rows(n).T for n in (10, 2)}
        tensors |= {f"{AT}mlp.experts.{n}.{up}.weight": rows(n + 0.5) for n in (10, 2)}
        tensors |= {f"{AT}mlp.experts.{n}.{gate}.weight": rows(n) for n in (10, 2)}
        made = dict(tensors_of_rank(tensors))
        assert made[f"{AT}mlp.experts.w13_weight"].tolist() == [[[2, 2], [2.5, 2.5]], [[10, 10], [10.5, 10.5]]]
        assert made[f"{AT}mlp.experts.w2_weight"].shape == (2, 2, 1)
