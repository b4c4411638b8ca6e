"""Refuses NaN, infinity and probabilities above one before they reach a loss.

Every mask has the shape of its tensors, which may be any shape. Each check reads its result back from the device once;
call it once per batch, not once per micro-batch.
"""

import torch
from torch import Tensor

ABOVE_ZERO = 1e-3
"""The largest log-probability above 0 that counts as rounding."""


def check_finite(mask: Tensor, **tensors: Tensor) -> None:
    """Refuse NaN and infinity at unmasked places: ValueError with the name, the count and the first place."""
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} but mask has {tuple(mask.shape)}")
        refuse(name, tensor, mask & ~tensor.isfinite(), "not finite")


def check_logprobs(mask: Tensor, **logprobs: Tensor) -> None:
    """Refuse log-probs that are NaN, infinite or positive beyond rounding at unmasked places: ValueError."""
    check_finite(mask, **logprobs)
    for name, tensor in logprobs.items():
        refuse(name, tensor, mask & (tensor > ABOVE_ZERO), "above 0, so not a log-probability")


def check_any(mask: Tensor) -> None:
    """Refuse a batch in which every token is masked (ValueError): it has no training signal."""
    if not bool(mask.any()):
        raise ValueError(f"every token of the batch is masked (mask has shape {tuple(mask.shape)})")


def refuse(name: str, tensor: Tensor, bad: Tensor, why: str) -> None:
    """Raise ValueError if any entry is bad; the message has the first one."""
    if not bool(bad.any()):
        return
    place = tuple(int(i) for i in torch.nonzero(bad)[0])
    raise ValueError(
        f"{name}{list(place)} = {float(tensor[place])} is {why} ({int(bad.sum())} of {bad.numel()} places)"
    )
