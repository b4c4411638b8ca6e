"""Two layouts of the same response tokens, and the few moves between them that every function here needs.

B sequences, T response tokens (padded on the right), N response tokens (packed, N = sum of lengths).

    padded   x_BT                     cu_seqlens=None
    packed   x_N and cu_seqlens       cu_seqlens[b] .. cu_seqlens[b+1] are the tokens of sequence b; int,
    [B+1]

`mask` is bool and True only for tokens that the policy sampled and that are trained. What stands at a masked
place may be anything, NaN included: it is replaced before it is used, never multiplied by zero.
Sums go through the padded layout: they are deterministic on a GPU, which scattered additions are not.
"""

import torch
from torch import Tensor


def check(mask: Tensor, cu_seqlens: Tensor | None, **tensors: Tensor) -> None:
    """Refuse tensors that do not have the mask's shape, and masks that do not fit the layout (ValueError)."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, not {mask.dtype}: use mask.bool()")
    if mask.dim() != (2 if cu_seqlens is None else 1):
        wanted = "[B, T]" if cu_seqlens is None else "[N] with cu_seqlens [B + 1]"
        raise ValueError(f"mask has shape {tuple(mask.shape)}; this layout needs {wanted}")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point()):
        raise ValueError("cu_seqlens must be a 1-d integer tensor: 0, then the end of every sequence")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} but mask has {tuple(mask.shape)}")


def check_sequences(mask: Tensor, cu_seqlens: Tensor | None, **per_sequence: Tensor) -> None:
    """Refuse tensors that do not have one entry for each sequence (ValueError)."""
    num_sequences = mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, tensor in per_sequence.items():
        if tensor.shape != (num_sequences,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({num_sequences},)")


def at_least_float32(x: Tensor) -> Tensor:
    """float64 stays, everything smaller is computed in float32."""
    return x if x.dtype == torch.float64 else x.float()


def fill(x: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """x where the mask is True, `value` elsewhere; a masked NaN reaches neither result nor gradient."""
    return at_least_float32(x).masked_fill(~mask, value)


def valid_tokens(cu_seqlens: Tensor) -> Tensor:
    """[B, T] bool, True where sequence b has a t-th token; T is the longest length."""
    lengths_B = cu_seqlens.diff()
    longest = int(lengths_B.max())
    return torch.arange(longest, device=cu_seqlens.device) < lengths_B[:, None]


def pad(x_N: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[N] -> [B, T], zero (or False) beyond the end; a tensor that is already padded comes back as it is."""
    if cu_seqlens is None:
        return x_N
    if int(cu_seqlens[-1]) != x_N.shape[0]:
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])} but there are {x_N.shape[0]} tokens")
    valid_BT = valid_tokens(cu_seqlens)
    return x_N.new_zeros(valid_BT.shape).masked_scatter(valid_BT, x_N)


def pack(x_BT: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[B, T] -> [N], the inverse of `pad`; without cu_seqlens the padded tensor comes back as it is."""
    return x_BT if cu_seqlens is None else x_BT.masked_select(valid_tokens(cu_seqlens))


def segment_ids(cu_seqlens: Tensor) -> Tensor:
    """[N] long, the sequence that each packed token belongs to."""
    lengths_B = cu_seqlens.diff().long()
    return torch.arange(lengths_B.shape[0], device=cu_seqlens.device).repeat_interleave(lengths_B)


def sequence_sum(x: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[B], the sum of x over the unmasked tokens of each sequence."""
    return pad(fill(x, mask), cu_seqlens).sum(-1)


def sequence_count(mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[B] long, how many unmasked tokens each sequence has."""
    return pad(mask, cu_seqlens).sum(-1)


def sequence_mean(x: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[B], the mean of x over the unmasked tokens of each sequence; 0 for a sequence that has none."""
    return sequence_sum(x, mask, cu_seqlens) / sequence_count(mask, cu_seqlens).clamp(min=1)


def spread(x_B: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """One number per sequence -> the same number at each of its unmasked tokens, zero at masked ones."""
    shape = mask.shape if cu_seqlens is None else (x_B.shape[0], int(cu_seqlens.diff().max()))
    x_BT = x_B[:, None].expand(shape)
    return pack(x_BT, cu_seqlens).masked_fill(~mask, 0)


def last_token(mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Bool in the mask's layout: True at the last unmasked token of each sequence that has one."""
    mask_BT = pad(mask, cu_seqlens)
    remaining_BT = mask_BT.flip(-1).cumsum(-1).flip(-1)
    return pack(mask_BT & (remaining_BT == 1), cu_seqlens)


def on_last_token(x_B: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """One score per sequence -> a token reward: the score on the last unmasked token, zero elsewhere."""
    check(mask, cu_seqlens)
    check_sequences(mask, cu_seqlens, x_B=x_B)
    return spread(x_B, last_token(mask, cu_seqlens), cu_seqlens)
