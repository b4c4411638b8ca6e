"""Adapters merged into the weights beside them, by hand."""

import pytest
import torch

from streamppo.errors import WeightsError
from streamppo.weights.adapters import merge_adapters

W, NORM = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.ones(2)
A, B = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[2.0], [3.0]])
FROZEN = {"at.q.weight": W, "at.norm.weight": NORM}
ADAPTERS = {"at.q.lora_A.weight": A, "at.q.lora_B.weight": B}


def test_a_weight_gets_the_scaled_product_of_its_adapter_and_others_are_the_very_tensors() -> None:
    made = merge_adapters(FROZEN, ADAPTERS, 0.5)
    assert list(made) == list(FROZEN)
    assert made["at.norm.weight"] is NORM
    assert made["at.q.weight"].tolist() == [[2.0, 2.0, 2.0], [5.5, 5.0, 4.5]]
    assert W[0].tolist() == [1.0, 2.0, 3.0]


def test_the_sum_is_rounded_once() -> None:
    """In bfloat16 1 + 2 ** -8 is 1, and 1 + 3 * 2 ** -8 is not, though each of its thirds would be lost."""
    one, third = torch.ones(1, 1, dtype=torch.bfloat16), torch.full((1, 3), 2**-8, dtype=torch.bfloat16)
    adapters = {"q.lora_A.weight": torch.ones(3, 1, dtype=torch.bfloat16), "q.lora_B.weight": third}
    made = merge_adapters({"q.weight": one}, adapters, 1.0)["q.weight"]
    assert made.dtype == torch.bfloat16
    assert made.item() == 1.015625
    assert merge_adapters({"q.weight": one}, adapters, 1 / 3)["q.weight"].item() == 1.0


@pytest.mark.parametrize(
    ("adapters", "named"),
    [
        ({"at.q.lora_A.weight": A}, "at.q"),
        ({**ADAPTERS, "at.norm.weight": NORM}, "at.norm.weight"),
        ({"at.k.lora_A.weight": A, "at.k.lora_B.weight": B}, "at.k.weight"),
        ({"at.q.lora_A.weight": A[:, :2], "at.q.lora_B.weight": B}, "at.q.weight"),
        ({"at.q.lora_A.weight": A, "at.q.lora_B.weight": B.repeat(1, 2)}, "at.q.weight"),
    ],
)
def test_what_fits_no_weight_is_refused_by_name(adapters: dict[str, torch.Tensor], named: str) -> None:
    with pytest.raises(WeightsError, match=named):
        merge_adapters(FROZEN, adapters, 1.0)
