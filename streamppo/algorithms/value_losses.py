"""The critic's loss, one number per token, and the share of the returns' variance that the critic explains.

B sequences, T response tokens (padded). `values_BT` are the critic's current outputs. `proximal_values_BT` are the
critic's outputs at the start of the update. `returns_BT` come from `advantages` or `vtrace`.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.masked import check_tokens, fill

ValueKind = Literal["mse", "huber"]


class TokenValueLoss(NamedTuple):
    """`loss` [B, T] is differentiable and zero at masked tokens; `clipped` is True where the clip sets the loss."""

    loss: Tensor
    clipped: Tensor


def regression(error_BT: Tensor, kind: ValueKind, huber_delta: float) -> Tensor:
    """[B, T], the loss of an error e, by kind:

        mse      0.5 * e^2
        huber    0.5 * e^2                                      |e| <= huber_delta
        huber    huber_delta * (|e| - 0.5 * huber_delta)        |e| > huber_delta

    Huber 1964, https://doi.org/10.1214/aoms/1177703732.
    """
    if kind == "mse":
        return 0.5 * error_BT.square()
    size_BT = error_BT.abs()
    return torch.where(size_BT <= huber_delta, 0.5 * error_BT.square(), huber_delta * (size_BT - 0.5 * huber_delta))


def value_loss(
    values_BT: Tensor,
    proximal_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip: float | None,
    kind: ValueKind = "mse",
    huber_delta: float = 1.0,
) -> TokenValueLoss:
    """Regression of values on returns; moving a value by more than `clip` from its proximal value gains nothing.

        free    = regression(values - returns)
        moved   = clamp(values - proximal_values, -clip, clip)
        bounded = regression(proximal_values + moved - returns)
        loss    = max(free, bounded)

    Section 6 of the GAE paper asks for a trust region on values (https://arxiv.org/abs/1506.02438); this form is from
    OpenAI's baselines, detail 9 of https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/. clip =
    None is plain regression.
    """
    check_tokens(mask_BT, values_BT=values_BT, proximal_values_BT=proximal_values_BT, returns_BT=returns_BT)
    values_BT, returns_BT = fill(values_BT, mask_BT), fill(returns_BT.detach(), mask_BT)
    free_BT = regression(values_BT - returns_BT, kind, huber_delta)
    if clip is None:
        return TokenValueLoss(free_BT, torch.zeros_like(mask_BT))
    anchor_BT = fill(proximal_values_BT.detach(), mask_BT)
    moved_BT = values_BT - anchor_BT
    bounded_BT = regression(anchor_BT + moved_BT.clamp(-clip, clip) - returns_BT, kind, huber_delta)
    # Inside the clip both losses are equal up to the rounding of anchor + moved, which must not count as clipping.
    clipped_BT = (moved_BT.abs() > clip) & (bounded_BT > free_BT)
    return TokenValueLoss(torch.where(clipped_BT, bounded_BT, free_BT), clipped_BT & mask_BT)


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """The share of the returns' variance that the critic explains; a critic worse than a constant gives < 0.

    1 - Var(returns - values) / Var(returns)        0 if the returns have no variance
    """
    check_tokens(mask_BT, values_BT=values_BT, returns_BT=returns_BT)
    targets_BT = fill(returns_BT.detach(), mask_BT).double()
    errors_BT = targets_BT - fill(values_BT.detach(), mask_BT).double()
    sums_BT = (mask_BT, targets_BT, targets_BT.square(), errors_BT, errors_BT.square())
    sums = torch.stack([x_BT.sum().double() for x_BT in sums_BT]).cpu()
    count, total, squares, error_total, error_squares = (float(x) for x in sums)
    if count == 0:
        return 0.0
    variance = squares / count - (total / count) ** 2
    error_variance = error_squares / count - (error_total / count) ** 2
    return 1 - error_variance / variance if variance > 1e-12 * max(1.0, squares / count) else 0.0
