"""Measures the largest tensor of a computation."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """`elements` is the size of the largest tensor that an operation has made, views excluded."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.elements = max(self.elements, tensor.numel())
        return made
