"""The tensors of a model's files in SGLang's layout: some are fused into larger ones, under SGLang's names."""

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

FUSED = (
    (r"\.(q|k|v)_proj\.", ".qkv_proj."),
    (r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.", ".experts.w13_"),
    (r"\.experts\.\d+\.(down_proj|w2)\.", ".experts.w2_"),
    (r"\.(gate|up)_proj\.", ".gate_up_proj."),
)
"""Patterns of tensor names that SGLang fuses into a larger tensor, and that tensor's name."""
ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")
"""Order of the parts in a fused tensor, concatenated by rows."""


def held_name(name: str) -> str:
    """SGLang's name of the tensor that contains the model file's tensor `name`."""
    for part, whole in FUSED:
        name = re.sub(part, whole, name)
    return name


def tensors_of_rank(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of a model in the layout of a single SGLang rank; experts are stacked, [experts, rows, columns].

    A fused tensor is a copy: keep one at a time.
    """
    parts: dict[str, dict[int, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        place = next((at for at, part in enumerate(ORDER) if f".{part}." in name), 0)
        parts.setdefault(held_name(name), {}).setdefault(int(expert[1]) if expert else -1, {})[place] = tensor
    for name, blocks in parts.items():
        joined = [_joined([one for _, one in sorted(block.items())]) for _, block in sorted(blocks.items())]
        yield name, joined[0] if -1 in blocks else torch.stack(joined)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
