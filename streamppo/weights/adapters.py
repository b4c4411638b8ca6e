"""Merges low-rank adapters into the frozen weights. Pure: no Ray.

    W + scale * B A        for every W [out, in] with an adapter: A [rank, in], B [out, rank]

LoRA, https://arxiv.org/abs/2106.09685, equation 3.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from streamppo.errors import WeightsError

A, B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


def pair_adapters(adapters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (A, B) by the name of their W. Raises `WeightsError` if a tensor is no A or B, or lacks its partner."""
    names = {name.removesuffix(A).removesuffix(B) for name in adapters}
    if wrong := [name for name in names if {name + A, name + B} - adapters.keys()]:
        raise WeightsError(f"{sorted(wrong)[0]} is not an adapter, or lacks the other of its two tensors")
    return {name + WEIGHT: (adapters[name + A], adapters[name + B]) for name in sorted(names)}


@torch.no_grad()
def merge_adapters(frozen: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return all weights of the model in the order of `frozen`. A weight without an adapter is not copied.

    The sum is computed in float32 and rounded once. Raises `WeightsError` for an adapter without a matching weight.
    """
    pairs = pair_adapters(adapters)
    for name, (a, b) in pairs.items():
        shape = None if name not in frozen else tuple(frozen[name].shape)
        if shape != (len(b), a.shape[-1]) or len(a) != b.shape[-1]:
            raise WeightsError(f"the adapter of {name} is {tuple(b.shape)} x {tuple(a.shape)}, the weight {shape}")
    merged = dict(frozen)
    for name, (a, b) in pairs.items():
        merged[name] = torch.add(frozen[name].float(), b.float() @ a.float(), alpha=scale).to(frozen[name].dtype)
    return merged
