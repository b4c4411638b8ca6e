"""Checks, sums and ratios of masked response tokens.

B sequences, T response tokens (padded on the right). `mask_BT` is bool, and True only for tokens that the policy
sampled and that are trained on. A masked entry may be any number, also NaN: it is replaced before use. Sums run along
the padded rows, which is deterministic on a GPU, unlike scattered additions.
"""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated. e^20 is 5e8, and float32 can hold its square."""
ABOVE_ZERO = 1e-3
"""A log-probability up to this much above 0 counts as a rounding error."""


def check_tokens(mask_BT: Tensor, **tensors_BT: Tensor) -> None:
    """Raise ValueError if the mask is not bool [B, T] or, with its name, if a tensor has another shape."""
    if mask_BT.dtype != torch.bool:
        raise ValueError(f"mask must be bool, not {mask_BT.dtype}: use mask.bool()")
    if mask_BT.dim() != 2:
        raise ValueError(f"mask has shape {tuple(mask_BT.shape)}; it must be [B, T]")
    for name, tensor in tensors_BT.items():
        if tensor.shape != mask_BT.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} but mask has {tuple(mask_BT.shape)}")


def check_sequences(mask_BT: Tensor, **tensors_B: Tensor) -> None:
    """Raise ValueError, with the name, for tensors that do not have one entry for each sequence."""
    for name, tensor in tensors_B.items():
        if tensor.shape != mask_BT.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({mask_BT.shape[0]},)")


def check_finite(mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError for the first unmasked NaN or infinity. Call it once per batch: it synchronises with the GPU."""
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} but mask has {tuple(mask.shape)}")
        refuse(name, tensor, mask & ~tensor.isfinite(), "not finite")


def check_logprobs(mask: Tensor, **logprobs: Tensor) -> None:
    """Raise ValueError for log-probs at unmasked entries that are not finite, or positive beyond rounding."""
    check_finite(mask, **logprobs)
    for name, tensor in logprobs.items():
        refuse(name, tensor, mask & (tensor > ABOVE_ZERO), "above 0, so not a log-probability")


def check_any(mask: Tensor) -> None:
    """Raise ValueError for a batch in which every token is masked: it has no training signal."""
    if not bool(mask.any()):
        raise ValueError(f"every token of the batch is masked (mask has shape {tuple(mask.shape)})")


def refuse(name: str, tensor: Tensor, bad: Tensor, why: str) -> None:
    """Raise ValueError if an entry of `tensor` is `bad`, with the first such entry and the reason `why`."""
    if not bool(bad.any()):
        return
    index = tuple(int(i) for i in torch.nonzero(bad)[0])
    raise ValueError(
        f"{name}{list(index)} = {float(tensor[index])} is {why} ({int(bad.sum())} of {bad.numel()} entries)"
    )


def at_least_float32(x: Tensor) -> Tensor:
    """Convert x, of any shape, to float32; leave float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def fill(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T], x where the mask is True, 0 elsewhere; a masked NaN reaches neither result nor gradient."""
    return at_least_float32(x_BT).masked_fill(~mask_BT, 0.0)


def sequence_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B], the sum of x over the unmasked tokens of each sequence."""
    return fill(x_BT, mask_BT).sum(-1)


def sequence_count(mask_BT: Tensor) -> Tensor:
    """[B] long, the number of unmasked tokens of each sequence."""
    return mask_BT.sum(-1)


def sequence_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B], the mean of x over the unmasked tokens of each sequence; 0 if all are masked."""
    return sequence_sum(x_BT, mask_BT) / sequence_count(mask_BT).clamp(min=1)


def spread(x_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T], each sequence's number at each of its unmasked tokens, zero at masked ones."""
    return x_B[:, None].expand(mask_BT.shape).masked_fill(~mask_BT, 0)


def last_token(mask_BT: Tensor) -> Tensor:
    """[B, T] bool, True at the last unmasked token of each sequence; all False if all are masked."""
    remaining_BT = mask_BT.flip(-1).cumsum(-1).flip(-1)
    return mask_BT & (remaining_BT == 1)


def on_last_token(x_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] token rewards: each sequence's score on its last unmasked token, zero elsewhere."""
    check_tokens(mask_BT)
    check_sequences(mask_BT, x_B=x_B)
    return spread(x_B, last_token(mask_BT))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(log_ratio, -20, 20)), of any shape: a ratio without overflow, with gradient 0 outside the bounds."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
