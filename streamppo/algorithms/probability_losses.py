"""Policy losses that bound probabilities instead of ratios: DPPO by total variation and by binary KL, and IPO.

Symbols, shapes and rules are those of policy_losses.py. p is the proximal probability of a token, q the current
probability. A dropped token has loss 0 and still counts in the denominator.
"""

from torch import Tensor

from streamppo.algorithms.masked import bounded_exp, fill
from streamppo.algorithms.policy_losses import TokenLoss, token_log_ratio

REST_FLOOR = 1e-8
"""The lower bound of 1 - p under a logarithm, because a token's probability p may be 1."""


def dppo_tv(
    logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, delta: float = 0.15
) -> TokenLoss:
    """DPPO bounds the PROBABILITY: a token whose probability moved by more than delta in A's direction is dropped.

        shift = exp(logprobs) - exp(proximal_logprobs)
        loss  = 0 if shift * sign(A) > delta else -A * r

    The binary total-variation form of https://arxiv.org/abs/2602.04879, which bounds the move from the behavior policy
    (`corrections.behavior_as_proximal`). Ratio clipping bounds rare tokens tightly and likely tokens loosely; this loss
    does the reverse. delta = 1 gives `policy_losses.importance_weighted`.
    """
    if delta < 0:
        raise ValueError(f"delta must not be negative, got {delta}")
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    shift_BT = fill(logprobs_BT.detach(), mask_BT).exp() - fill(proximal_logprobs_BT.detach(), mask_BT).exp()
    return _drop_tokens(log_ratio_BT, advantages_BT, mask_BT, shift_BT * advantages_BT.sign() > delta)


def dppo_kl(
    logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, delta: float = 0.05
) -> TokenLoss:
    """DPPO by KL: a token whose binary KL(p || q) exceeds delta, by a move in A's direction, is dropped.

        KL    = p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))
        loss  = 0 if KL > delta and (q - p) * A > 0 else -A * r

    The binary KL form of https://arxiv.org/abs/2602.04879, whose anchor is the behavior policy. Unlike `dppo_tv`, it
    bounds moves near 0 and 1 more tightly than moves near 1/2. An infinite delta gives
    `policy_losses.importance_weighted`.
    """
    if delta < 0:
        raise ValueError(f"delta must not be negative, got {delta}")
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

        loss  = 0 if abs(q - p) > eps else -A * r

    In prime-rl (https://docs.primeintellect.ai/prime-rl/ipo) p is of the behavior policy. Unlike `dppo_tv`, IPO drops
    moves in both directions. eps = 1 gives `policy_losses.importance_weighted`. A preference loss is also called IPO.
    """
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    shift_BT = fill(logprobs_BT.detach(), mask_BT).exp() - fill(proximal_logprobs_BT.detach(), mask_BT).exp()
    return _drop_tokens(log_ratio_BT, advantages_BT, mask_BT, shift_BT.abs() > eps)


def _drop_tokens(log_ratio_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, dropped_BT: Tensor) -> TokenLoss:
    """The loss -A * r, set to 0 at the tokens `dropped_BT`."""
    ratio_BT = bounded_exp(log_ratio_BT)
    loss_BT = (-advantages_BT * ratio_BT).masked_fill(~mask_BT | dropped_BT, 0.0)
    return TokenLoss(loss_BT, mask_BT & dropped_BT, ratio_BT.detach())
