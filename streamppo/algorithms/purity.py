"""A user's function of tensors has to be pure: it leaves its inputs, and equal inputs give equal results.

The inputs are the learner's tensors, and a resume or a replay repeats updates.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Inputs = TypeVar("Inputs", bound=tuple[Tensor, ...])


def leaving_inputs(function: Callable[[Inputs], object], name: str) -> Callable[[Inputs], object]:
    """Wrap a function of a NamedTuple of tensors; a call that changes one of them raises `ValueError`."""

    def watched(inputs: Inputs) -> object:
        before = [column.detach().clone() for column in inputs]
        result = function(inputs)
        for field, old, new in zip(type(inputs).__annotations__, before, inputs, strict=True):
            if not torch.equal(old, new):
                raise ValueError(f"the {name} changes its input {field}: work on a copy")
        return result

    return watched


def check_repeatable(first: Tensor, again: Tensor, what: str) -> None:
    """Raise `ValueError` if two results for the same inputs differ; the message begins with `what`."""
    if not torch.allclose(first, again, rtol=1e-4, atol=1e-6):
        raise ValueError(f"{what} from call to call: a resume could not repeat an update")
