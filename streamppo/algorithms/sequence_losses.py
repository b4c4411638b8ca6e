"""Policy losses with one ratio per response: GSPO, sequence PPO, GMPO and VESPO.

Symbols, shapes and rules are those of policy_losses.py.
"""

import torch
from torch import Tensor

from streamppo.algorithms.masked import LOG_RATIO_BOUND, bounded_exp, fill, sequence_mean, sequence_sum, spread
from streamppo.algorithms.policy_losses import TokenLoss, clip_surrogate, token_log_ratio

FADED = 0.5
"""A token counts as clipped if VESPO keeps less than this share of its gradient."""


def gspo(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """GSPO: one ratio per response, because the reward is per response; the ratio is normalised by length.

        s_b   = exp(mean_t(logprobs_bt - proximal_logprobs_bt))
        s_bt  = stop(s_b) * r_bt / stop(r_bt)
        loss  = max(-A * s_bt, -A * clamp(s_bt, 1 - clip_low, 1 + clip_high))

    The token form (GSPO-token) of https://arxiv.org/abs/2507.18071. Under "sequence-mean-token-mean", its value and
    gradient equal those of the sequence form. One-token responses give `policy_losses.clipped`.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    ratio_BT = _token_form(log_ratio_BT, mask_BT)
    loss_BT, clipped_BT = clip_surrogate(ratio_BT, advantages_BT, clip_low, clip_high)
    return TokenLoss(loss_BT.masked_fill(~mask_BT, 0.0), clipped_BT & mask_BT, ratio_BT.detach())


def _token_form(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """s_bt = stop(exp(mean_t(log_ratio_bt))) * exp(log_ratio_bt) / stop(exp(log_ratio_bt))"""
    mean_B = sequence_mean(log_ratio_BT.detach(), mask_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return spread(mean_B, mask_BT).exp() * (log_ratio_BT - log_ratio_BT.detach()).exp()


def sequence_clipped(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """PPO on whole responses: the ratio is of a response's probabilities, the product over its tokens.

        R_b     = exp(clamp(sum_t(logprobs_bt - proximal_logprobs_bt), -20, 20))
        A_b     = mean_t(A_bt)
        loss_bt = max(-A_b * R_b, -A_b * clamp(R_b, 1 - clip_low, 1 + clip_high))

    PPO, https://arxiv.org/abs/1707.06347, with the whole response as one action. Aggregate the loss with
    "sequence-mean-token-mean", which counts each response once. The gradient grows with the response's length.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    ratio_B = bounded_exp(sequence_sum(log_ratio_BT, mask_BT))
    advantages_B = sequence_mean(advantages_BT, mask_BT)
    loss_B, clipped_B = clip_surrogate(ratio_B, advantages_B, clip_low, clip_high)
    return TokenLoss(spread(loss_B, mask_BT), spread(clipped_B, mask_BT), spread(ratio_B.detach(), mask_BT))


def gmpo(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    log_low: float = 0.4,
    log_high: float = 0.4,
) -> TokenLoss:
    """GMPO: the geometric mean of a response's clipped ratios, so that a single outlier changes the mean little.

        l_bt  = logprobs_bt - proximal_logprobs_bt
        c_bt  = min(l_bt, log_high) if A_bt > 0 else max(l_bt, -log_low) if A_bt < 0 else l_bt
        G_b   = exp(mean_t(c_bt))
        g_bt  = stop(G_b) * exp(c_bt) / stop(exp(c_bt))
        loss  = -A * g_bt

    The paper, https://arxiv.org/abs/2507.20673, has the bounds e^-0.4 and e^0.4. This is its token form: under
    "sequence-mean-token-mean", value and gradient equal the paper's. Without bounds this is GSPO without bounds.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    above_BT = (advantages_BT > 0) & (log_ratio_BT > log_high)
    below_BT = (advantages_BT < 0) & (log_ratio_BT < -log_low)
    kept_BT = log_ratio_BT.masked_fill(above_BT, log_high).masked_fill(below_BT, -log_low)
    ratio_BT = _token_form(kept_BT, mask_BT)
    loss_BT = (-advantages_BT * ratio_BT).masked_fill(~mask_BT, 0.0)
    return TokenLoss(loss_BT, (above_BT | below_BT) & mask_BT, ratio_BT.detach())


def vespo(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> TokenLoss:
    """VESPO: the ratio of a whole response, reshaped so that neither small nor large ratios dominate the gradient.

        W_b         = exp(clamp(sum_t(logprobs_bt - proximal_logprobs_bt), -20, 20))
        k, lambda   = positive if A >= 0 else negative
        phi_bt      = W_b^k * exp(lambda * (1 - W_b))
        loss        = -stop(phi_bt) * A * logprobs

    In the paper, https://arxiv.org/abs/2602.10693, W is current / behavior. phi is 1 at W = 1, where the gradient is
    REINFORCE's, and falls on both sides of W = k / lambda. `clipped` is True where phi < FADED.
    """
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    log_W_B = sequence_sum(log_ratio_BT.detach(), mask_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    W_B = log_W_B.exp()
    rising_B, falling_B = (bounded_exp(k * log_W_B + rate * (1 - W_B)) for k, rate in (positive, negative))
    phi_BT = torch.where(advantages_BT >= 0, rising_B[:, None], falling_B[:, None])
    loss_BT = -phi_BT * advantages_BT * fill(logprobs_BT, mask_BT)
    return TokenLoss(loss_BT, mask_BT & (phi_BT < FADED), spread(W_B, mask_BT))
