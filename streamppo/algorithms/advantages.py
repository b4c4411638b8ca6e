"""Advantages and returns from a critic: GAE and its special cases, and the sequence-level form.

B sequences, T response tokens (padded). `values_BT[:, t]` is the critic's estimate before token t. `bootstrap_B` is its
estimate after the last token, 0 for a finished response. Rewards must be on unmasked tokens (`masked.on_last_token`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms import masked
from streamppo.algorithms.scan import group_sums, next_unmasked, reverse_scan
from streamppo.algorithms.value_losses import explained_variance

VARIANCE_FLOOR = 1e-8
"""Added to the variance in `whiten`, so that equal values become zero instead of NaN."""


class AdvantageEstimate(NamedTuple):
    """[B, T] each, zero where masked: the policy is trained on advantages, the critic on returns."""

    advantages: Tensor
    returns: Tensor


def column(number: float | Tensor, like_BT: Tensor) -> Tensor:
    """Reshape a number, or a [B] tensor of one number per sequence, so that it broadcasts over [B, T]."""
    tensor = torch.as_tensor(number, dtype=like_BT.dtype, device=like_BT.device)
    return tensor[:, None] if tensor.dim() == 1 else tensor


def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, bootstrap_B: Tensor, *, gamma: float, lam: float | Tensor
) -> AdvantageEstimate:
    """GAE: an exponentially weighted sum of TD errors trades the critic's bias against the sampling variance.

        delta_t      = rewards_t + gamma * values_{t+1} - values_t
        advantages_t = delta_t + gamma * lam * advantages_{t+1}
        returns_t    = advantages_t + values_t

    values_{t+1} is the value at the next UNMASKED token; after the last token it is bootstrap_B. Schulman et al. 2015,
    https://arxiv.org/abs/1506.02438. lam = 0 is the one-step TD error, lam = 1 is Monte Carlo minus the value. `lam`
    may be a [B] tensor, see `adaptive_lambda`.
    """
    masked.check_tokens(mask_BT, rewards_BT=rewards_BT, values_BT=values_BT)
    masked.check_sequences(mask_BT, bootstrap_B=bootstrap_B)
    values_BT, rewards_BT = masked.fill(values_BT, mask_BT).detach(), masked.fill(rewards_BT, mask_BT)
    next_values_BT = next_unmasked(values_BT, mask_BT, bootstrap_B.detach())
    delta_BT = rewards_BT + gamma * next_values_BT - values_BT
    decay_BT = (gamma * column(lam, values_BT)).expand_as(values_BT)
    advantages_BT = reverse_scan(delta_BT, decay_BT, mask_BT)
    return AdvantageEstimate(advantages_BT, advantages_BT + values_BT)


def gae_actor_critic(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    bootstrap_B: Tensor,
    *,
    gamma: float,
    lam_actor: float | Tensor,
    lam_critic: float | Tensor,
) -> AdvantageEstimate:
    """Different lambdas for actor and critic: advantages from lam_actor, returns from lam_critic.

    VC-PPO (https://arxiv.org/abs/2503.01491) and VAPO (https://arxiv.org/abs/2504.05118) use lam_critic = 1,
    so that a final reward reaches the first token of a long response undiscounted. Equal lambdas give `gae`.
    """
    actor = gae(rewards_BT, values_BT, mask_BT, bootstrap_B, gamma=gamma, lam=lam_actor)
    critic = gae(rewards_BT, values_BT, mask_BT, bootstrap_B, gamma=gamma, lam=lam_critic)
    return AdvantageEstimate(actor.advantages, critic.returns)


def adaptive_lambda(lengths_B: Tensor, alpha: float) -> Tensor:
    """[B], a lambda for each response; a longer response has a larger lambda.

        lam = clamp(1 - 1 / (alpha * length), 0, 1)

    VAPO, https://arxiv.org/abs/2504.05118 (alpha = 0.05). The weights lam^k sum to alpha * length, so a final reward
    reaches the same FRACTION of every response.
    """
    lengths_B = masked.at_least_float32(lengths_B).clamp(min=1)
    return (1 - 1 / (alpha * lengths_B)).clamp(0.0, 1.0)


def outcomes_explained(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, known_B: Tensor, *, gamma: float
) -> float:
    """The share of the outcomes' variance that the critic explains; 0 if no sequence has a known outcome.

        explained  = 1 - Var(outcomes - values) / Var(outcomes)
        outcomes_t = rewards_t + gamma * outcomes_{t+1}

    `known_B` [B] is True for sequences that have all their rewards; the variances are over their tokens.
    """
    masked.check_sequences(mask_BT, known_B=known_B)
    known_BT, bootstrap_B = mask_BT & known_B[:, None], torch.zeros_like(values_BT[:, 0])
    outcomes_BT = gae(rewards_BT, values_BT, known_BT, bootstrap_B, gamma=gamma, lam=1.0).returns
    return explained_variance(values_BT, outcomes_BT, known_BT)


def sequence_level(scores_B: Tensor, baseline_B: Tensor, mask_BT: Tensor) -> AdvantageEstimate:
    """Treat the whole response as one action: every token has the same advantage and the same return.

        advantages_t = score - baseline
        returns_t    = score

    REINFORCE with a baseline (Williams 1992, https://doi.org/10.1007/BF00992696). baseline_B is the critic's value of
    the prompt. Use a loss with one ratio per response (`sequence_losses`). For responses of one token this is `gae`.
    """
    masked.check_tokens(mask_BT)
    masked.check_sequences(mask_BT, scores_B=scores_B, baseline_B=baseline_B)
    scores_B, baseline_B = masked.at_least_float32(scores_B), masked.at_least_float32(baseline_B).detach()
    return AdvantageEstimate(masked.spread(scores_B - baseline_B, mask_BT), masked.spread(scores_B, mask_BT))


def whiten(
    x_BT: Tensor, mask_BT: Tensor, *, shift_mean: bool = True, unbiased: bool = False, group_ids_B: Tensor | None = None
) -> Tensor:
    """[B, T]: scale x to unit variance, so that one learning rate fits all reward scales; masked tokens stay zero.

        y = (x - mean) / sqrt(var + VARIANCE_FLOOR)             shift_mean
        y = (x - mean) / sqrt(var + VARIANCE_FLOOR) + mean      not shift_mean

    Mean and variance are over the unmasked tokens of the batch or, with group_ids_B, of each group of sequences. The
    variance divides by the number of tokens n, or by n - 1 if `unbiased`. Detail 7 of
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.
    """
    masked.check_tokens(mask_BT, x_BT=x_BT)
    values_BT = masked.fill(x_BT, mask_BT)
    wide_BT = values_BT.double()
    sums_B = masked.sequence_sum(wide_BT, mask_BT), masked.sequence_sum(wide_BT.square(), mask_BT)
    sums_3B = torch.stack([masked.sequence_count(mask_BT).double(), *sums_B])
    if group_ids_B is not None:
        masked.check_sequences(mask_BT, group_ids_B=group_ids_B)
        sums = group_sums(sums_3B, group_ids_B)
    else:
        sums = sums_3B.sum(-1)
    tokens, total, squares = sums.unbind()
    mean = total / tokens.clamp(min=1)
    variance = (squares / tokens.clamp(min=1) - mean.square()).clamp(min=0)
    if unbiased:
        variance = variance * tokens / (tokens - 1).clamp(min=1)
    scale = (variance + VARIANCE_FLOOR).rsqrt()
    if group_ids_B is not None:
        mean, scale = masked.spread(mean, mask_BT), masked.spread(scale, mask_BT)
    whitened_BT = (wide_BT - mean) * scale + (0.0 if shift_mean else mean)
    return whitened_BT.to(values_BT.dtype).masked_fill(~mask_BT, 0.0)
