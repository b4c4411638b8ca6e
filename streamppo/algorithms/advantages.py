"""Advantages and returns from a critic: GAE and its special cases, and the sequence-level form.

B sequences, T response tokens (padded), N response tokens (packed). `values[t]` is the critic's estimate
before token t is taken; `bootstrap_B` is its estimate after the last token: 0 where the response ended by
itself, the critic's value where it was cut off. A reward must stand on an unmasked token
(`layout.on_last_token`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.layout import (
    at_least_float32,
    check,
    check_sequences,
    fill,
    pack,
    pad,
    sequence_count,
    sequence_sum,
    spread,
)
from streamppo.algorithms.scan import next_unmasked, reverse_scan


class Estimate(NamedTuple):
    """What the policy learns from (advantages) and what the critic learns (returns); zero where masked."""

    advantages: Tensor
    returns: Tensor


def check_fraction(**knobs: float | Tensor) -> None:
    """Refuse discounts and lambdas outside [0, 1] (ValueError); NaN is outside."""
    for name, knob in knobs.items():
        inside = (knob >= 0) & (knob <= 1)
        if not bool(torch.as_tensor(inside).all()):
            raise ValueError(f"{name} must lie in [0, 1], got {knob}")


def column(knob: float | Tensor, like_BT: Tensor) -> Tensor:
    """A number, or one number per sequence, as something that broadcasts over [B, T]."""
    knob_ = torch.as_tensor(knob, dtype=like_BT.dtype, device=like_BT.device)
    return knob_[:, None] if knob_.dim() == 1 else knob_


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap_B: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    cu_seqlens: Tensor | None = None,
) -> Estimate:
    """An exponentially weighted sum of TD errors trades the critic's bias against the sampling variance.

        delta_t = rewards_t + gamma * values_{t+1} - values_t
        advantages_t = delta_t + gamma * lam * advantages_{t+1};   returns_t = advantages_t + values_t

    t+1 is the next UNMASKED token (bootstrap_B after the last). Schulman et al. 2015,
    https://arxiv.org/abs/1506.02438. lam = 0 is the one-step TD error, lam = 1 is Monte Carlo minus the
    value. `lam` may be a [B] tensor, see `adaptive_lambda`. Raises ValueError on shapes that do not fit.
    """
    check(mask, cu_seqlens, rewards=rewards, values=values)
    check_sequences(mask, cu_seqlens, bootstrap_B=bootstrap_B)
    check_fraction(gamma=gamma, lam=lam)
    mask_BT = pad(mask, cu_seqlens)
    values_BT = pad(fill(values, mask), cu_seqlens).detach()
    rewards_BT = pad(fill(rewards, mask), cu_seqlens)
    next_values_BT = next_unmasked(values_BT, mask_BT, bootstrap_B.detach())
    delta_BT = rewards_BT + gamma * next_values_BT - values_BT
    decay_BT = (gamma * column(lam, values_BT)).expand_as(values_BT)
    advantages_BT = reverse_scan(delta_BT, decay_BT, mask_BT)
    returns_BT = advantages_BT + values_BT
    return Estimate(pack(advantages_BT, cu_seqlens), pack(returns_BT, cu_seqlens))


def gae_actor_critic(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap_B: Tensor,
    *,
    gamma: float,
    lam_actor: float | Tensor,
    lam_critic: float | Tensor,
    cu_seqlens: Tensor | None = None,
) -> Estimate:
    """Actor and critic want different lambdas: advantages from lam_actor, returns from lam_critic.

    VC-PPO (https://arxiv.org/abs/2503.01491) and VAPO (https://arxiv.org/abs/2504.05118) use lam_critic = 1,
    so that a final reward reaches the first token of a long response undiscounted. Equal lambdas give `gae`.
    """
    actor = gae(rewards, values, mask, bootstrap_B, gamma=gamma, lam=lam_actor, cu_seqlens=cu_seqlens)
    critic = gae(rewards, values, mask, bootstrap_B, gamma=gamma, lam=lam_critic, cu_seqlens=cu_seqlens)
    return Estimate(actor.advantages, critic.returns)


def adaptive_lambda(lengths_B: Tensor, alpha: float) -> Tensor:
    """A longer response needs a longer horizon: lam = 1 - 1 / (alpha * length), clamped to [0, 1]; [B].

    VAPO, https://arxiv.org/abs/2504.05118 (alpha = 0.05). The weights lam^k sum to alpha * length, so a
    final reward reaches the same FRACTION of every response.
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    lengths_B = at_least_float32(lengths_B).clamp(min=1)
    return (1 - 1 / (alpha * lengths_B)).clamp(0.0, 1.0)


def sequence_level(scores_B: Tensor, baseline_B: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Estimate:
    """The whole response is one action: every token carries advantage = score - baseline, return = score.

    REINFORCE with a baseline (Williams 1992, https://doi.org/10.1007/BF00992696). baseline_B is the critic's
    value of the prompt, or any number that does not depend on the response. Goes with a sequence-level ratio.
    """
    check(mask, cu_seqlens)
    check_sequences(mask, cu_seqlens, scores_B=scores_B, baseline_B=baseline_B)
    advantages_B = at_least_float32(scores_B) - at_least_float32(baseline_B).detach()
    return Estimate(spread(advantages_B, mask, cu_seqlens), spread(at_least_float32(scores_B), mask, cu_seqlens))


class Moments(NamedTuple):
    """Token count, sum and sum of squares in float64: add them over ranks, then whiten with the total."""

    tokens: Tensor
    total: Tensor
    squares: Tensor


def moments(x: Tensor, mask: Tensor, *, group_ids: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Moments:
    """The sums that `whiten` needs: scalars, or with group_ids [B] each sequence's group's sums, [B]."""
    check(mask, cu_seqlens, x=x)
    values = fill(x, mask).double()
    sums_3B = torch.stack(
        [
            sequence_count(mask, cu_seqlens).double(),
            sequence_sum(values, mask, cu_seqlens),
            sequence_sum(values.square(), mask, cu_seqlens),
        ]
    )
    if group_ids is None:
        return Moments(*sums_3B.sum(-1).unbind())
    check_sequences(mask, cu_seqlens, group_ids=group_ids)
    same_BB = (group_ids[:, None] == group_ids[None, :]).double()
    return Moments(*(sums_3B @ same_BB).unbind())


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    unbiased: bool = False,
    eps: float = 1e-8,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    total: Moments | None = None,
) -> Tensor:
    """Advantages of unit variance make one learning rate fit all reward scales; masked tokens stay zero.

        y = (x - mean) / sqrt(var + eps)  (+ mean unless shift_mean),   var over n or, unbiased, n - 1 tokens

    Over the batch, or within each group of sequences (group_ids [B]). `total` replaces the local `moments`,
    for a mean over all ranks. Detail 7 of
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/. Whitened twice is whitened once;
    a batch of equal values becomes zero.
    """
    sums = moments(x, mask, group_ids=group_ids, cu_seqlens=cu_seqlens) if total is None else total
    mean = sums.total / sums.tokens.clamp(min=1)
    variance = (sums.squares / sums.tokens.clamp(min=1) - mean.square()).clamp(min=0)
    if unbiased:
        variance = variance * sums.tokens / (sums.tokens - 1).clamp(min=1)
    scale = (variance + eps).rsqrt()
    if group_ids is not None:
        mean, scale = spread(mean, mask, cu_seqlens), spread(scale, mask, cu_seqlens)
    values = fill(x, mask)
    whitened = (values.double() - mean) * scale + (0.0 if shift_mean else mean)
    return whitened.to(values.dtype).masked_fill(~mask, 0.0)
