"""The policy's loss, one number per token, from an advantage and the current and proximal policies.

B sequences, T response tokens (padded). Every function returns a `TokenLoss`, zero at masked tokens. The learner
multiplies `loss` by a `Correction`'s weights and passes it to `aggregate`. No gradient flows into advantages and
proximal log-probs. `logprobs_BT` are of the current policy. In the formulas, at every token:

    r = exp(clamp(logprobs - proximal_logprobs, -20, 20))
    A = advantages
    p, q = exp(proximal_logprobs), exp(logprobs)
    stop(x) = x, without its gradient

DPPO and IPO bound p and q instead of r. A token that they drop has loss 0 and still counts in the denominator.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.masked import bounded_exp, check_tokens, fill

REST_FLOOR = 1e-8
"""The lower bound of 1 - p and 1 - q under a logarithm, because a token's probability may be 1."""


class TokenLoss(NamedTuple):
    """[B, T] each: `loss` is differentiable; `clipped` is True where its gradient is limited; `ratio` is detached."""

    loss: Tensor
    clipped: Tensor
    ratio: Tensor


def token_log_ratio(
    logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Check shapes and return log(current / proximal) and the advantages, [B, T] each, both zero at masked tokens."""
    check_tokens(
        mask_BT, logprobs_BT=logprobs_BT, proximal_logprobs_BT=proximal_logprobs_BT, advantages_BT=advantages_BT
    )
    log_ratio_BT = fill(logprobs_BT, mask_BT) - fill(proximal_logprobs_BT.detach(), mask_BT)
    return log_ratio_BT, fill(advantages_BT.detach(), mask_BT)


def clip_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return the loss and the `clipped` mask for ratios and advantages of one shape, [B, T] or [B].

    loss    = max(-A * r, -A * clamp(r, 1 - clip_low, 1 + clip_high))
    clipped = the second is larger
    """
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, bounded), bounded > free


def clipped(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO: moving the ratio out of [1 - clip_low, 1 + clip_high] in the advantage's direction gains nothing.

        loss = max(-A * r, -A * clamp(r, 1 - clip_low, 1 + clip_high))
        loss = min(loss, -A * dual_clip)        where A < 0, if dual_clip is set

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; clip_high > clip_low is DAPO's clip-higher
    (https://arxiv.org/abs/2503.14476); dual_clip > 1 is from https://arxiv.org/abs/1912.09729.
    At current == proximal the gradient is that of `reinforce`.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    loss_BT, clipped_BT = clip_surrogate(ratio_BT, advantages_BT, clip_low, clip_high)
    if dual_clip is not None:
        ceiling_BT = -advantages_BT * dual_clip
        above_BT = (advantages_BT < 0) & (loss_BT > ceiling_BT)
        loss_BT, clipped_BT = torch.where(above_BT, ceiling_BT, loss_BT), clipped_BT | above_BT
    return TokenLoss(loss_BT.masked_fill(~mask_BT, 0.0), clipped_BT & mask_BT, ratio_BT.detach())


def cispo(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> TokenLoss:
    """CISPO clips the WEIGHT and keeps the gradient: rare, decisive tokens continue to learn outside the bounds.

        loss = -stop(clamp(r, 1 - clip_low, 1 + clip_high)) * A * logprobs

    MiniMax-M1, https://arxiv.org/abs/2506.13585; ScaleRL, https://arxiv.org/abs/2510.13786, has a bound of about 5.
    clip_low = 1 means no lower bound. Without clipping the gradient is that of `importance_weighted`.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT.detach())
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -weight_BT * advantages_BT * fill(logprobs_BT, mask_BT)
    return TokenLoss(loss_BT, (weight_BT != ratio_BT) & mask_BT, ratio_BT)


def reinforce(logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> TokenLoss:
    """REINFORCE, the plain policy gradient; the ratio is reported and not used.

        loss = -A * logprobs

    Williams 1992, https://doi.org/10.1007/BF00992696. The gradient is unbiased if the current policy sampled the data,
    or if a `Correction`'s weights make up for the difference.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT.detach())
    return TokenLoss(-advantages_BT * fill(logprobs_BT, mask_BT), torch.zeros_like(mask_BT), ratio_BT)


def importance_weighted(
    logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
) -> TokenLoss:
    """PPO's surrogate before clipping: an unbiased gradient and no trust region.

        loss = -A * r

    Conservative policy iteration, section 3 of https://arxiv.org/abs/1707.06347: `clipped` with infinite bounds.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    loss_BT = (-advantages_BT * ratio_BT).masked_fill(~mask_BT, 0.0)
    return TokenLoss(loss_BT, torch.zeros_like(mask_BT), ratio_BT.detach())


def sapo(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """SAPO: a smooth gate reduces the gradient as the ratio moves away from 1, instead of clipping it.

        tau  = tau_positive if A > 0 else tau_negative
        gate = sigmoid(tau * (r - 1))
        loss = -A * gate * 4 / tau

    https://arxiv.org/abs/2511.20347. At r = 1 the gradient is PPO's. `clipped` is True where the gate leaves less than
    half of the gradient.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    tau_BT = torch.where(advantages_BT > 0, tau_positive, tau_negative)
    gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1))
    passed_BT = (4 * gate_BT * (1 - gate_BT)).detach()
    loss_BT = (-advantages_BT * gate_BT * 4 / tau_BT).masked_fill(~mask_BT, 0.0)
    return TokenLoss(loss_BT, mask_BT & (passed_BT < 0.5), ratio_BT.detach())


def dppo_tv(
    logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, delta: float = 0.15
) -> TokenLoss:
    """DPPO by total variation: a token whose PROBABILITY moved by more than delta in A's direction is dropped.

        loss = 0 if (q - p) * sign(A) > delta else -A * r

    https://arxiv.org/abs/2602.04879, whose p is the behavior policy's (`corrections.behavior_as_proximal`). Ratio
    clipping bounds rare tokens tightly and likely tokens loosely; DPPO does the reverse. delta = 1 gives
    `importance_weighted`.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    shift_BT = fill(logprobs_BT.detach(), mask_BT).exp() - fill(proximal_logprobs_BT.detach(), mask_BT).exp()
    return _drop_tokens(log_ratio_BT, advantages_BT, mask_BT, shift_BT * advantages_BT.sign() > delta)


def dppo_kl(
    logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, delta: float = 0.05
) -> TokenLoss:
    """DPPO by KL: a token whose binary KL(p || q) exceeds delta, by a move in A's direction, is dropped.

        KL   = p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))
        loss = 0 if KL > delta and (q - p) * A > 0 else -A * r

    https://arxiv.org/abs/2602.04879. Unlike `dppo_tv`, it bounds moves near 0 and 1 more tightly than moves near 1/2.
    An infinite delta gives `importance_weighted`.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    log_q_BT, log_p_BT = fill(logprobs_BT.detach(), mask_BT), fill(proximal_logprobs_BT.detach(), mask_BT)
    rest_q_BT, rest_p_BT = ((-x_BT.expm1()).clamp(min=REST_FLOOR) for x_BT in (log_q_BT, log_p_BT))
    kl_BT = log_p_BT.exp() * (log_p_BT - log_q_BT) + rest_p_BT * (rest_p_BT / rest_q_BT).log()
    outwards_BT = (log_q_BT - log_p_BT) * advantages_BT > 0
    return _drop_tokens(log_ratio_BT, advantages_BT, mask_BT, (kl_BT > delta) & outwards_BT)


def ipo(
    logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, eps: float = 0.3
) -> TokenLoss:
    """IPO (INTELLECT Policy Optimization): a token whose probability moved by more than eps is dropped.

        loss = 0 if abs(q - p) > eps else -A * r

    In prime-rl (https://docs.primeintellect.ai/prime-rl/ipo) p is of the behavior policy. Unlike `dppo_tv`, IPO drops
    moves in both directions. eps = 1 gives `importance_weighted`. A preference loss is also called IPO.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    shift_BT = fill(logprobs_BT.detach(), mask_BT).exp() - fill(proximal_logprobs_BT.detach(), mask_BT).exp()
    return _drop_tokens(log_ratio_BT, advantages_BT, mask_BT, shift_BT.abs() > eps)


def _drop_tokens(log_ratio_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, dropped_BT: Tensor) -> TokenLoss:
    ratio_BT = bounded_exp(log_ratio_BT)
    loss_BT = (-advantages_BT * ratio_BT).masked_fill(~mask_BT | dropped_BT, 0.0)
    return TokenLoss(loss_BT, mask_BT & dropped_BT, ratio_BT.detach())


def positive_nll(logprobs_BT: Tensor, right_BT: Tensor, count: float) -> Tensor:
    """A micro-batch's share of the mean negative log-likelihood of right answers' tokens; differentiable.

        -sum(logprobs_t over right) / count

    VAPO, section 4.3, https://arxiv.org/abs/2504.05118 (weight mu = 0.1). `count` is the number of tokens of right
    answers in the whole minibatch; if it is 0, so is the term.
    """
    check_tokens(right_BT, logprobs_BT=logprobs_BT)
    return -fill(logprobs_BT, right_BT).sum() / max(count, 1.0)
