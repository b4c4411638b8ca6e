"""Expert parallelism: tokens go to the ranks of their experts, and the results come back.

    pairs    a token and one of its k experts, ordered by the rank of the expert
    there    a rank's experts compute the pairs of all ranks, each as a token with one expert
    back     a token's k results are summed on the token's own rank

The ranks of a group may pass different rows, of different widths. As in GShard, https://arxiv.org/abs/2006.16668, but
without a capacity: no token is left out.

N tokens of a rank, D width, M = N * k pairs, P pairs that a rank receives.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens, each token's experts, the experts' weights) -> the weighted sum of the experts' outputs for each token."""


def dispatch_to_experts(
    compute: Compute,
    group: dist.ProcessGroup,
    experts: int,
    hidden_ND: Tensor,
    index_Nk: Tensor,
    weights_Nk: Tensor,
) -> Tensor:
    """Compute each token by its experts; every rank of `group` has `experts` consecutive ones. A collective.

    All ranks make the same number of passes, as FSDP2 also needs.
    """
    top_k, index_M = index_Nk.shape[1], index_Nk.flatten()
    rank_M = index_M // experts
    order_M = rank_M.argsort(stable=True)
    sent_R = rank_M.bincount(minlength=dist.get_world_size(group))
    received_R = torch.empty_like(sent_R)
    dist.all_to_all_single(received_R, sent_R, group=group)
    received, back = received_R.tolist(), sent_R.tolist()

    def exchanged(tensor: Tensor) -> Tensor:
        return _ExchangeTokens.apply(tensor, group, received, back)  # pyright: ignore[reportReturnType]

    hidden_PD = exchanged(hidden_ND[order_M // top_k])
    index_P, weights_P = exchanged((index_M % experts)[order_M]), exchanged(weights_Nk.flatten()[order_M])
    if not len(hidden_PD):
        # One zero row, so that unused weights have a gradient too: all ranks reduce the same tensors.
        hidden_PD, index_P, weights_P = (_empty_experts(values) for values in (hidden_PD, index_P, weights_P))
    found_PD = compute(hidden_PD, index_P[:, None], weights_P[:, None])[: sum(received)]
    found_MD: Tensor = _ExchangeTokens.apply(found_PD, group, back, received)  # pyright: ignore[reportAssignmentType]
    return found_MD[order_M.argsort()].view(*index_Nk.shape, -1).sum(1)


def _empty_experts(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])


class _ExchangeTokens(torch.autograd.Function):
    """Send `back[r]` rows to every rank r, and receive `there[r]` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, there: list[int], back: list[int]) -> Tensor:
        ctx.given = group, back, there
        received = rows.new_empty(sum(there), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), there, back, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return _ExchangeTokens.apply(gradient, *ctx.given), None, None, None  # pyright: ignore
