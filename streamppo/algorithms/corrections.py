"""Correction for data older than the proximal policy: weights = proximal / behavior, truncated, masked or off.

B sequences, T response tokens (padded), M unmasked tokens. A correction's `weights` are detached and multiply the
per-token loss. A dropped token has weight 0 and still counts in the denominators (`aggregate`), so dropping leaves the
other tokens' weights unchanged.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.masked import bounded_exp, check_tokens, fill, sequence_mean, sequence_sum, spread
from streamppo.algorithms.scan import running_sum

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask", "off"]
NOTHING: Mapping[str, Tensor] = MappingProxyType({})


class Correction(NamedTuple):
    """[B, T] each: `weights` multiply the loss; `keep` is True where an unmasked token is kept.

    `dropped` maps the name of each rule to the unmasked tokens that this rule drops, even if others drop them too.
    """

    weights: Tensor
    keep: Tensor
    dropped: Mapping[str, Tensor] = NOTHING


def log_weights(proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, level: Level) -> Tensor:
    """[B, T], the log-ratio of the proximal to the behavior policy; detached and not clamped; 0 at masked tokens.

    log_w_bt = proximal_logprobs_bt - behavior_logprobs_bt        token
    log_W_b  = sum_t(log_w_bt)                                    sequence
    log_W_b  = mean_t(log_w_bt)                                   geometric
    """
    check_tokens(mask_BT, proximal_logprobs_BT=proximal_logprobs_BT, behavior_logprobs_BT=behavior_logprobs_BT)
    log_w_BT = fill(proximal_logprobs_BT.detach(), mask_BT) - fill(behavior_logprobs_BT.detach(), mask_BT)
    if level == "token":
        return log_w_BT
    if level == "sequence":
        return spread(sequence_sum(log_w_BT, mask_BT), mask_BT)
    return spread(sequence_mean(log_w_BT, mask_BT), mask_BT)


def importance_weights(
    proximal_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: Level,
    mode: Mode,
    cap: float = 2.0,
    floor: float = 0.0,
    lo: float = 0.5,
    hi: float = 5.0,
) -> Correction:
    """Weight old data by w = proximal / behavior, so that its gradient is that of the proximal policy.

        truncate   weights = max(floor, min(w, cap))           bounded variance, some bias
        mask       weights = w if lo <= w <= hi else 0         outliers are noise: drop them
        off        weights = 1                                 biased if the policies differ

    Truncation: Ionides 2008 (https://doi.org/10.1198/106186008X320456); in LLM training it is called TIS
    (https://fengyao.notion.site/off-policy-rl), and corrects engine mismatch. TRL, slime and NeMo-RL have a floor.
    Masking: IcePop (https://arxiv.org/abs/2510.18855). The weight is separate from the clipped ratio, as in
    https://arxiv.org/abs/2110.00641. With proximal == behavior all weights are 1 if the floor is at most 1.
    """
    log_w_BT = log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level=level)
    if mode == "off":
        return Correction(mask_BT.to(log_w_BT.dtype), mask_BT)
    weights_BT = bounded_exp(log_w_BT)
    if mode == "truncate":
        return Correction(weights_BT.clamp(floor, cap).masked_fill(~mask_BT, 0.0), mask_BT)
    keep_BT = mask_BT & in_band(log_w_BT, lo, hi)
    return Correction(weights_BT.masked_fill(~keep_BT, 0.0), keep_BT, {"mask": mask_BT & ~keep_BT})


def in_band(log_w_BT: Tensor, lo: float, hi: float) -> Tensor:
    """[B, T] bool: lo <= exp(log_w) <= hi, compared in log space; NaN is inside, so that it leads to a bad step."""
    log_lo = math.log(lo) if lo > 0 else -math.inf
    return ~((log_w_BT < log_lo) | (log_w_BT > math.log(hi)))


def topr(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
) -> Correction:
    """TOPR: negative responses lose weight as they become unlikely; positive responses have weight 1 at any age.

        W_b     = exp(sum_t(proximal_logprobs_bt - behavior_logprobs_bt))
        weights = min(W_b, 1) if A < 0 else 1

    In the paper, https://arxiv.org/abs/2503.14286, the numerator is the current policy and A is a reward of 1 or -1.
    Here the sign of each token's advantage decides. With proximal == behavior all weights are 1.
    """
    check_tokens(mask_BT, advantages_BT=advantages_BT)
    log_W_BT = log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="sequence")
    # `clamp` keeps NaN, so that it leads to a bad step.
    tapered_BT = bounded_exp(log_W_BT.clamp(max=0.0))
    is_negative_BT = fill(advantages_BT, mask_BT) < 0
    weights_BT = torch.where(is_negative_BT, tapered_BT, torch.ones_like(tapered_BT))
    return Correction(weights_BT.masked_fill(~mask_BT, 0.0), mask_BT)


def scale_negatives(loss_BT: Tensor, advantages_BT: Tensor, *, negative: float) -> Tensor:
    """[B, T], the losses, multiplied by `negative`, a number in [0, 1], at tokens with a negative advantage.

        loss = negative * loss if A < 0 else loss

    With 0 only positive advantages contribute, which narrows the policy (https://arxiv.org/abs/2506.01347).
    """
    return loss_BT if negative == 1 else torch.where(advantages_BT < 0, loss_BT * negative, loss_BT)


def second_moment_mask(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, threshold: float = 0.04
) -> Correction:
    """M2PO: drop the tokens of largest |log w|, as few as possible, until the second moment of the rest is small.

        weights = w if kept else 0
        mean over kept of (log w)^2 <= threshold

    https://arxiv.org/abs/2510.01161. Unlike a mean log-ratio, the second moment has no terms that cancel, and it bounds
    the chi-squared of the weights. If the bound holds on each rank, it holds over all ranks.
    """
    log_w_BT = log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="token")
    log_w_M = log_w_BT[mask_BT]
    order_M = log_w_M.abs().argsort(stable=True)
    squares_M = log_w_M.double().square()[order_M]
    means_M = running_sum(squares_M[None])[0] / torch.arange(1, squares_M.shape[0] + 1, device=squares_M.device)
    kept_M = torch.zeros_like(order_M, dtype=torch.bool)
    kept_M[order_M[: int((means_M <= threshold).sum())]] = True
    keep_BT = torch.zeros_like(mask_BT).masked_scatter(mask_BT, kept_M)
    weights_BT = bounded_exp(log_w_BT).masked_fill(~keep_BT, 0.0)
    return Correction(weights_BT, keep_BT, {"second_moment": mask_BT & ~keep_BT})


def current_as_proximal(behavior_logprobs_BT: Tensor, logprobs_BT: Tensor, lag_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: the current log-probs, detached; in an update of one step they equal the proximal log-probs."""
    check_tokens(mask_BT, behavior_logprobs_BT=behavior_logprobs_BT, logprobs_BT=logprobs_BT, lag_BT=lag_BT)
    return fill(logprobs_BT.detach(), mask_BT)


def loglinear_proximal(behavior_logprobs_BT: Tensor, logprobs_BT: Tensor, lag_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: proximal log-probs, interpolated between behavior and current log-probs by the token's lag.

        weight_t   = 1 / (lag_t + 1)
        proximal_t = weight_t * behavior_logprobs_t + (1 - weight_t) * logprobs_t        (detached)

    A-3PO, https://arxiv.org/abs/2512.06547, where d = lag + 1. At lag 0 the proximal policy is the behavior policy; for
    large lag it approaches the current policy.
    """
    check_tokens(mask_BT, behavior_logprobs_BT=behavior_logprobs_BT, logprobs_BT=logprobs_BT, lag_BT=lag_BT)
    behavior_BT, current_BT = fill(behavior_logprobs_BT.detach(), mask_BT), fill(logprobs_BT.detach(), mask_BT)
    weight_BT = 1 / (fill(lag_BT, mask_BT).clamp(min=0).to(current_BT.dtype) + 1)
    return weight_BT * behavior_BT + (1 - weight_BT) * current_BT


def behavior_as_proximal(behavior_logprobs_BT: Tensor, logprobs_BT: Tensor, lag_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: behavior log-probs in place of proximal log-probs: one ratio covers the lag and the update's steps.

        ratio_t = exp(logprobs_t - behavior_logprobs_t)

    Plain PPO (https://arxiv.org/abs/1707.06347) and DPPO (https://arxiv.org/abs/2602.04879) use this ratio.
    """
    check_tokens(mask_BT, behavior_logprobs_BT=behavior_logprobs_BT, logprobs_BT=logprobs_BT, lag_BT=lag_BT)
    return fill(behavior_logprobs_BT.detach(), mask_BT)
