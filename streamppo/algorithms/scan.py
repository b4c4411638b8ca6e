"""The two parts of every multi-step estimate: the next unmasked token, and a discounted sum backwards in time.

B sequences, T response tokens (padded), S rows of numbers. Both parts skip masked tokens: an estimate on a response
with tool output in the middle equals the estimate on the response without the output.
"""

import torch
from torch import Tensor


def next_unmasked(x_BT: Tensor, mask_BT: Tensor, after_B: Tensor) -> Tensor:
    """[B, T], x at the next unmasked token after t; after_B[b] if no unmasked token follows."""
    T = x_BT.shape[1]
    index_BT = torch.arange(T, device=x_BT.device).expand_as(x_BT).masked_fill(~mask_BT, T)
    first_at_or_after_BT = index_BT.flip(-1).cummin(-1).values.flip(-1)
    end_B1 = first_at_or_after_BT.new_full((x_BT.shape[0], 1), T)
    following_BT = torch.cat([first_at_or_after_BT[:, 1:], end_B1], dim=-1)
    return torch.cat([x_BT, after_B.to(x_BT)[:, None]], dim=-1).gather(-1, following_BT)


def reverse_scan(increments_BT: Tensor, decay_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T], the recurrence behind all returns, computed in log2(T) doubling steps.

        y_t = increments_t + decay_t * y_{t+1}

    A masked token passes y_{t+1} on; the result at the token is zero. Each step combines neighbours (d, x) and (d', x')
    into (d * d', x + d * x'), which is associative (Blelloch 1990, https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf).
    """
    total_BT = increments_BT.masked_fill(~mask_BT, 0.0)
    decay_BT = decay_BT.masked_fill(~mask_BT, 1.0)
    step = 1
    while step < total_BT.shape[1]:
        later_BT = torch.nn.functional.pad(total_BT[:, step:], (0, step))
        later_decay_BT = torch.nn.functional.pad(decay_BT[:, step:], (0, step))
        total_BT = total_BT + decay_BT * later_BT
        decay_BT = decay_BT * later_decay_BT
        step *= 2
    return total_BT.masked_fill(~mask_BT, 0.0)


def leaders(group_ids_B: Tensor) -> Tensor:
    """[B], for each sequence the index of the first sequence of its group; a group need not be contiguous."""
    order_B = group_ids_B.argsort(stable=True)
    leader_B = torch.empty_like(order_B)
    leader_B[order_B] = order_B[_starts(group_ids_B[order_B])]
    return leader_B


def group_sums(x_SB: Tensor, group_ids_B: Tensor) -> Tensor:
    """[S, B], for each sequence the sum of x over its group.

    A `reverse_scan` over the sequences, sorted by group, that restarts at each group. Unlike scattered additions, it
    gives the same bits in every run.
    """
    order_B = group_ids_B.argsort(stable=True)
    start_B = _starts(group_ids_B[order_B])
    ends_B = torch.nn.functional.pad(start_B[1:] != start_B[:-1], (0, 1), value=True)
    decay_SB = (~ends_B).to(x_SB.dtype).expand_as(x_SB)
    total_SB = reverse_scan(x_SB[:, order_B], decay_SB, torch.ones_like(x_SB, dtype=torch.bool))
    sums_SB = torch.empty_like(total_SB)
    sums_SB[:, order_B] = total_SB[:, start_B]
    return sums_SB


def _starts(sorted_ids_B: Tensor) -> Tensor:
    """[B], for each index the start of its run of equal ids."""
    place_B = torch.arange(len(sorted_ids_B), device=sorted_ids_B.device)
    begins_B = torch.nn.functional.pad(sorted_ids_B[1:] != sorted_ids_B[:-1], (1, 0), value=True)
    return place_B.masked_fill(~begins_B, 0).cummax(-1).values


def running_sum(x_BT: Tensor) -> Tensor:
    """[B, T], the sum of x up to and including t; unlike `cumsum`, this is deterministic on a GPU."""
    total_BT = reverse_scan(x_BT.flip(-1), torch.ones_like(x_BT), torch.ones_like(x_BT, dtype=torch.bool))
    return total_BT.flip(-1)
