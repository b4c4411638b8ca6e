"""The critic's loss, one number per token, and how much of the returns the critic explains.

B sequences, T response tokens (padded), N response tokens (packed). `values` are the critic's current
outputs, `proximal_values` those it gave when the batch began; `returns` come from `advantages` or `vtrace`.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.layout import check, fill

ValueKind = Literal["mse", "huber"]


class TokenValueLoss(NamedTuple):
    """`loss` is differentiable, zero at masked tokens; `clipped` is True where the clip decides it."""

    loss: Tensor
    clipped: Tensor


def regression(error: Tensor, kind: ValueKind, huber_delta: float) -> Tensor:
    """0.5 e^2, or Huber's: the same up to |e| = huber_delta, then huber_delta (|e| - 0.5 huber_delta)."""
    if kind == "mse":
        return 0.5 * error.square()
    if kind != "huber":
        raise ValueError(f"unknown value loss {kind!r}: mse or huber")
    if huber_delta <= 0:
        raise ValueError(f"huber_delta must be positive, got {huber_delta}")
    size = error.abs()
    return torch.where(size <= huber_delta, 0.5 * error.square(), huber_delta * (size - 0.5 * huber_delta))


def value_loss(
    values: Tensor,
    proximal_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None,
    kind: ValueKind = "mse",
    huber_delta: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> TokenValueLoss:
    """Regress values on returns, and gain nothing by moving further than `clip` from where the batch began.

        loss = max(l(values - returns), l(proximal_values + clamp(values - proximal_values, +-clip) -
        returns))

    with l(e) = e^2 / 2 or Huber's. Section 6 of the GAE paper asks for a trust region on values
    (https://arxiv.org/abs/1506.02438); this form is the one of OpenAI's baselines, detail 9 of
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/. clip = None is plain regression.
    """
    check(mask, cu_seqlens, values=values, proximal_values=proximal_values, returns=returns)
    values, returns = fill(values, mask), fill(returns.detach(), mask)
    free = regression(values - returns, kind, huber_delta)
    if clip is None:
        return TokenValueLoss(free, torch.zeros_like(mask))
    if clip <= 0:
        raise ValueError(f"clip must be positive, got {clip}")
    anchor = fill(proximal_values.detach(), mask)
    moved = values - anchor
    bounded = regression(anchor + moved.clamp(-clip, clip) - returns, kind, huber_delta)
    # Inside the clip both are the same number but for the rounding of anchor + moved, which must not decide anything.
    clipped = (moved.abs() > clip) & (bounded > free)
    return TokenValueLoss(torch.where(clipped, bounded, free), clipped & mask)


def explained_variance_sums(
    values: Tensor, returns: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None
) -> Tensor:
    """[5] float64 (count, sum and squares of returns, sum and squares of errors): add over ranks."""
    check(mask, cu_seqlens, values=values, returns=returns)
    targets = fill(returns.detach(), mask).double()
    errors = targets - fill(values.detach(), mask).double()
    return torch.stack(
        [mask.sum().double(), targets.sum(), targets.square().sum(), errors.sum(), errors.square().sum()]
    )


def explained_variance_of(sums: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) from `explained_variance_sums`."""
    count, total, squares, error_total, error_squares = (float(x) for x in sums)
    if count == 0:
        return 0.0
    variance = squares / count - (total / count) ** 2
    error_variance = error_squares / count - (error_total / count) ** 2
    return 1 - error_variance / variance if variance > 1e-12 * max(1.0, squares / count) else 0.0


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> float:
    """How much of the returns' variance the critic accounts for: 1 is all, 0 is a constant, below 0 is harm.

        1 - Var(returns - values) / Var(returns)

    Returns that do not vary give 0: there was nothing to explain.
    """
    return explained_variance_of(explained_variance_sums(values, returns, mask, cu_seqlens=cu_seqlens))
