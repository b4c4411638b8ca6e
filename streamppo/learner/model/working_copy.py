"""A single rank's copy of its weights in the compute type; the trained weights stay float32.

    weights w (float32)  --rounded after each step-->  copy c (bfloat16)  --passes-->  dc (bfloat16), then dw += dc

The result equals FSDP's mixed precision bit for bit.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn


class WorkingCopy:
    """Makes `modules` compute with copies of their weights in `dtype`; their parameters stay the trained weights.

    Python looks up a module's attributes before its parameters: under a weight's name every forward pass finds the
    copy, and optimizers, checkpoints and pushes find the parameter. Tied weights share one copy.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        copies: dict[nn.Parameter, Tensor] = {}
        for module in (inner for outer in modules for inner in outer.modules()):
            for name, weight in module.named_parameters(recurse=False):
                if weight.dtype == dtype:
                    continue
                if weight not in copies:
                    copies[weight] = _copy_of(weight, dtype)
                module.__dict__[name] = copies[weight]
        self._weights: list[Tensor] = [*copies]
        self._copies = [*copies.values()]
        self._versions: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        """Copy all weights again if one of them has changed since the last call."""
        versions = [weight._version for weight in self._weights]
        if versions != self._versions:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._weights)
            self._versions = versions


def _copy_of(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    copy = torch.empty_like(weight, dtype=dtype, requires_grad=weight.requires_grad)
    if weight.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_add_gradient, weight))
    return copy


def _add_gradient(weight: nn.Parameter, copy: Tensor) -> None:
    assert copy.grad is not None
    if weight.grad is None:
        weight.grad = copy.grad.to(weight.dtype)
    else:
        weight.grad.add_(copy.grad)
    copy.grad = None
