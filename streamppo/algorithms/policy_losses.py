"""The policy's loss, one number per token, from ratio = current / proximal and an advantage.

B sequences, T response tokens (padded), N response tokens (packed). Every function returns a `TokenLoss` in
the mask's layout, zero at masked tokens; multiply `loss` by a `Correction`'s weights and hand it to
`aggregate`. Advantages and proximal log-probs are constants: no gradient flows into them. `logprobs` are the
current policy's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.layout import check, fill, sequence_mean, sequence_sum, spread

LOG_RATIO_BOUND = 20.0


class TokenLoss(NamedTuple):
    """`loss` is differentiable; `clipped` is True where the trust region acted; `ratio` is detached."""

    loss: Tensor
    clipped: Tensor
    ratio: Tensor


def token_log_ratio(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(log(current / proximal), advantages), both zero at masked tokens; shapes are checked here."""
    check(mask, cu_seqlens, logprobs=logprobs, proximal_logprobs=proximal_logprobs, advantages=advantages)
    log_ratio = fill(logprobs, mask) - fill(proximal_logprobs.detach(), mask)
    return log_ratio, fill(advantages.detach(), mask)


def clip_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """(max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high)), where the second is larger)."""
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip bounds must not be negative, got clip_low={clip_low}, clip_high={clip_high}")
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, bounded), bounded > free


def clipped(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_bound: float = LOG_RATIO_BOUND,
    cu_seqlens: Tensor | None = None,
) -> TokenLoss:
    """PPO: no reward for moving the ratio out of [1 - clip_low, 1 + clip_high] in the advantage's direction.

        loss = max(-A r, -A clamp(r, 1 - clip_low, 1 + clip_high));   A < 0 and dual_clip: min(loss, -A
        dual_clip)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; clip_high > clip_low is DAPO's clip-higher
    (https://arxiv.org/abs/2503.14476); dual_clip > 1 from https://arxiv.org/abs/1912.09729. The log-ratio is
    clamped to +-log_ratio_bound so that nothing overflows. At current == proximal the gradient is
    REINFORCE's.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be greater than 1, got {dual_clip}")
    log_ratio, advantages = token_log_ratio(logprobs, proximal_logprobs, advantages, mask, cu_seqlens)
    ratio = log_ratio.clamp(-log_ratio_bound, log_ratio_bound).exp()
    loss, was_clipped = clip_surrogate(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        above = (advantages < 0) & (loss > ceiling)
        loss, was_clipped = torch.where(above, ceiling, loss), was_clipped | above
    return TokenLoss(loss.masked_fill(~mask, 0.0), was_clipped & mask, ratio.detach())


def cispo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    cu_seqlens: Tensor | None = None,
) -> TokenLoss:
    """CISPO clips the WEIGHT and keeps the gradient: rare, decisive tokens go on learning beyond the bound.

        loss = -stop(clamp(r, 1 - clip_low, 1 + clip_high)) A logprobs

    MiniMax-M1, https://arxiv.org/abs/2506.13585; a bound of about 5 (clip_high = 4) is ScaleRL's,
    https://arxiv.org/abs/2510.13786. clip_low = 1 means no lower bound. Unclipped this is
    `importance_weighted`.
    """
    log_ratio, advantages = token_log_ratio(logprobs, proximal_logprobs, advantages, mask, cu_seqlens)
    ratio = log_ratio.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * advantages * fill(logprobs, mask)
    return TokenLoss(loss, (weight != ratio) & mask, ratio)


def gspo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    cu_seqlens: Tensor | None = None,
) -> TokenLoss:
    """GSPO: a reward for the response deserves a ratio of the response, normalised by its length.

        s_b = exp(mean_t log r_bt);   s_bt = stop(s_b) * r_bt / stop(r_bt);   loss = clipped surrogate of s_bt

    The token form (GSPO-token) of https://arxiv.org/abs/2507.18071: value and gradient equal the sequence
    form under "sequence-mean-token-mean", and advantages may differ by token. One-token responses give
    `clipped`.
    """
    log_ratio, advantages = token_log_ratio(logprobs, proximal_logprobs, advantages, mask, cu_seqlens)
    mean_B = sequence_mean(log_ratio.detach(), mask, cu_seqlens).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = spread(mean_B, mask, cu_seqlens).exp() * (log_ratio - log_ratio.detach()).exp()
    loss, was_clipped = clip_surrogate(ratio, advantages, clip_low, clip_high)
    return TokenLoss(loss.masked_fill(~mask, 0.0), was_clipped & mask, ratio.detach())


def sequence_clipped(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cu_seqlens: Tensor | None = None,
) -> TokenLoss:
    """PPO on whole responses: the ratio is that of the response's probability, the product over its tokens.

        R_b = exp(sum_t log r_bt);   A_b = mean_t A_bt;   every token carries max(-A_b R_b, -A_b clamp(R_b,
        ...))

    The bandit form of https://arxiv.org/abs/1707.06347 that small teaching trainers use. Aggregate it with
    "sequence-mean-token-mean", which counts each response once. One-token responses give `clipped`.
    """
    log_ratio, advantages = token_log_ratio(logprobs, proximal_logprobs, advantages, mask, cu_seqlens)
    log_ratio_B = sequence_sum(log_ratio, mask, cu_seqlens).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    advantages_B = sequence_mean(advantages, mask, cu_seqlens)
    ratio_B = log_ratio_B.exp()
    loss_B, clipped_B = clip_surrogate(ratio_B, advantages_B, clip_low, clip_high)
    return TokenLoss(
        spread(loss_B, mask, cu_seqlens),
        spread(clipped_B, mask, cu_seqlens),
        spread(ratio_B.detach(), mask, cu_seqlens),
    )


def reinforce(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> TokenLoss:
    """Plain policy gradient: loss = -A logprobs; the ratio is reported and not used.

    Williams 1992, https://doi.org/10.1007/BF00992696. Right when data comes from the current policy, or when
    a `Correction`'s weights make up for it.
    """
    log_ratio, advantages = token_log_ratio(logprobs, proximal_logprobs, advantages, mask, cu_seqlens)
    ratio = log_ratio.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return TokenLoss(-advantages * fill(logprobs, mask), torch.zeros_like(mask), ratio)


def importance_weighted(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> TokenLoss:
    """The surrogate before clipping, loss = -A r: an unbiased gradient with no trust region at all.

    Conservative policy iteration, as in section 3 of https://arxiv.org/abs/1707.06347. It is `clipped` with
    infinite bounds; at current == proximal its gradient is that of `reinforce`.
    """
    log_ratio, advantages = token_log_ratio(logprobs, proximal_logprobs, advantages, mask, cu_seqlens)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return TokenLoss((-advantages * ratio).masked_fill(~mask, 0.0), torch.zeros_like(mask), ratio.detach())


def dppo_tv(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    delta: float = 0.15,
    cu_seqlens: Tensor | None = None,
) -> TokenLoss:
    """DPPO: what must stay close is the PROBABILITY, so drop a token once |pi - mu| > delta in A's direction.

        drop = (A > 0 and pi - mu > delta) or (A < 0 and mu - pi > delta);   loss = -A r [not drop]

    The binary total-variation form of https://arxiv.org/abs/2602.04879, with mu the proximal policy (hand in
    behavior_logprobs for the paper's own two-policy form, and then no correction). Ratio clipping binds rare
    tokens and frees likely ones; this does the reverse. delta = 1 gives `importance_weighted`.
    """
    if delta < 0:
        raise ValueError(f"delta must not be negative, got {delta}")
    log_ratio, advantages = token_log_ratio(logprobs, proximal_logprobs, advantages, mask, cu_seqlens)
    shift = fill(logprobs.detach(), mask).exp() - fill(proximal_logprobs.detach(), mask).exp()
    dropped = mask & (shift * advantages.sign() > delta)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss = (-advantages * ratio).masked_fill(~mask | dropped, 0.0)
    return TokenLoss(loss, dropped, ratio.detach())


def sapo(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    cu_seqlens: Tensor | None = None,
) -> TokenLoss:
    """SAPO: a smooth gate fades the gradient out as the ratio leaves 1, instead of cutting it.

        loss = -A * 4 / tau * sigmoid(tau (r - 1)),   tau = tau_positive where A > 0, else tau_negative

    https://arxiv.org/abs/2511.20347. d loss / d r is -A sech^2(tau (r - 1) / 2): at r = 1 the gradient is
    PPO's. `clipped` reports where the gate lets less than half of the gradient through.
    """
    if tau_positive <= 0 or tau_negative <= 0:
        raise ValueError(f"temperatures must be positive, got {tau_positive} and {tau_negative}")
    log_ratio, advantages = token_log_ratio(logprobs, proximal_logprobs, advantages, mask, cu_seqlens)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1))
    passed = (4 * gate * (1 - gate)).detach()
    loss = (-advantages * gate * 4 / tau).masked_fill(~mask, 0.0)
    return TokenLoss(loss, mask & (passed < 0.5), ratio.detach())
