"""The data is older than the proximal policy: weights = proximal / behavior, truncated, masked or off.

B sequences, T response tokens (padded), N response tokens (packed). Every function returns a `Correction`
whose detached `weights` multiply the per-token loss. A dropped token has weight 0 and still counts in the
denominators (`aggregate`), so dropping shrinks the step and never inflates what remains.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.layout import check, fill, sequence_mean, sequence_sum, spread
from streamppo.algorithms.scan import running_sum

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask", "off"]
LOG_RATIO_BOUND = 20.0


class Correction(NamedTuple):
    """`weights` multiply the loss; `keep` is True where an unmasked token is kept. The mask's layout."""

    weights: Tensor
    keep: Tensor


def log_weights(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Level,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """log(proximal / behavior) of the token, of its whole response (sum), or its geometric mean; detached.

    Masked tokens are 0 and enter no sum. Not clamped: this is also what the diagnostics look at.
    """
    check(mask, cu_seqlens, proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs)
    difference = fill(proximal_logprobs.detach(), mask) - fill(behavior_logprobs.detach(), mask)
    if level == "token":
        return difference
    if level == "sequence":
        return spread(sequence_sum(difference, mask, cu_seqlens), mask, cu_seqlens)
    if level == "geometric":
        return spread(sequence_mean(difference, mask, cu_seqlens), mask, cu_seqlens)
    raise ValueError(f"unknown level {level!r}: token, sequence or geometric")


def importance_weights(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Level,
    mode: Mode,
    cap: float = 2.0,
    lo: float = 0.5,
    hi: float = 5.0,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """Reweighting old data by w = proximal / behavior makes its gradient that of the proximal policy.

        truncate   weights = min(w, cap)                       bounded variance, some bias
        mask       weights = w if lo <= w <= hi else 0         outliers are noise: drop them
        off        weights = 1                                 biased by whatever the lag is

    Truncation: Ionides 2008 (https://doi.org/10.1198/106186008X320456), for engine mismatch in LLM training
    TIS (https://fengyao.notion.site/off-policy-rl). Masking: IcePop, https://arxiv.org/abs/2510.18855.
    Decoupled from the clipped ratio as in https://arxiv.org/abs/2110.00641. With proximal == behavior all
    modes give 1.
    """
    log_w = log_weights(proximal_logprobs, behavior_logprobs, mask, level=level, cu_seqlens=cu_seqlens)
    if mode == "off":
        return Correction(mask.to(log_w.dtype), mask)
    weights = log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if mode == "truncate":
        if not cap > 0:
            raise ValueError(f"cap must be positive, got {cap}")
        return Correction(weights.clamp(max=cap).masked_fill(~mask, 0.0), mask)
    if mode == "mask":
        keep = mask & in_band(log_w, lo, hi)
        return Correction(weights.masked_fill(~keep, 0.0), keep)
    raise ValueError(f"unknown mode {mode!r}: truncate, mask or off")


def in_band(log_w: Tensor, lo: float, hi: float) -> Tensor:
    """Bool: lo <= exp(log_w) <= hi, compared in log space where nothing overflows."""
    if not 0 <= lo < hi:
        raise ValueError(f"the band needs 0 <= lo < hi, got lo={lo}, hi={hi}")
    log_lo = math.log(lo) if lo > 0 else -math.inf
    return (log_w >= log_lo) & (log_w <= math.log(hi))


def truncate_and_mask(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    mask_level: Literal["sequence", "geometric"] = "geometric",
    lo: float,
    hi: float,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """MIS: the token's weight is truncated, and a response that is an outlier as a whole is dropped.

        weights_t = min(w_t, cap) * [lo <= W <= hi],   W = product (sequence) or geometric mean of the w

    Liu, Li et al. 2025, https://richardli.xyz/rl-collapse. The geometric mean does not grow with length, so
    it does not drop responses for being long; the product does. With lo = 0, hi = inf this is truncation
    alone.
    """
    tokens = importance_weights(
        proximal_logprobs,
        behavior_logprobs,
        mask,
        level="token",
        mode="truncate",
        cap=cap,
        cu_seqlens=cu_seqlens,
    )
    log_w = log_weights(proximal_logprobs, behavior_logprobs, mask, level=mask_level, cu_seqlens=cu_seqlens)
    keep = mask & in_band(log_w, lo, hi)
    return Correction(tokens.weights.masked_fill(~keep, 0.0), keep)


def second_moment_mask(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    threshold: float = 0.04,
    cu_seqlens: Tensor | None = None,
) -> Correction:
    """M2PO: drop the fewest tokens, largest |log w| first, so that the rest has mean (log w)^2 <= threshold.

        weights = w if kept else 0

    https://arxiv.org/abs/2510.01161. The second moment cannot cancel as a mean log-ratio does, and it bounds
    the chi-squared of the weights. The mean is over the tokens given: a bound that holds on each rank holds
    on all. Without outliers nothing is dropped and the weights are the plain ratio.
    """
    if threshold < 0:
        raise ValueError(f"threshold must not be negative, got {threshold}")
    log_w = log_weights(proximal_logprobs, behavior_logprobs, mask, level="token", cu_seqlens=cu_seqlens)
    order = log_w.abs()[mask].argsort(stable=True)
    squares = log_w[mask].double().square()[order]
    means = running_sum(squares[None])[0] / torch.arange(1, squares.shape[0] + 1, device=squares.device)
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept[order[: int((means <= threshold).sum())]] = True
    keep = torch.zeros_like(mask).masked_scatter(mask, kept)
    weights = log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return Correction(weights.masked_fill(~keep, 0.0), keep)
