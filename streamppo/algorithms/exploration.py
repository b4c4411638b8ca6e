"""Entropy control: a change of the loss at selected tokens of a batch, or an adaptive entropy bonus.

B trajectories of a whole batch, T response tokens (padded). Tokens are selected once per batch, before its first step,
independently of micro-batches and ranks. `mask_BT` is True for tokens that are trained on.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.kl import K3_BOUND
from streamppo.algorithms.masked import LOG_RATIO_BOUND, check_tokens, fill


def high_entropy_mask(entropy_BT: Tensor, mask_BT: Tensor, *, share: float) -> Tensor:
    """[B, T] bool: True at the `share` of the tokens with the highest entropy of the policy.

        threshold = the ceil(share * n)-th largest entropy of the n unmasked tokens
        True where entropy >= threshold

    The paper "Beyond the 80/20 Rule" (https://arxiv.org/abs/2506.01939) uses share = 0.2. With share = 1 all tokens are
    selected.
    """
    check_tokens(mask_BT, entropy_BT=entropy_BT)
    entropy_N = entropy_BT[mask_BT]
    if not len(entropy_N):
        return mask_BT
    threshold = entropy_N.sort(descending=True).values[math.ceil(share * len(entropy_N)) - 1]
    return mask_BT & (entropy_BT >= threshold)


def covariance(logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] float64: each token's term in the covariance of advantage and log-prob; 0 where masked.

        covariance_t = (A_t - mean(A)) * (logprobs_t - mean(logprobs))        means over unmasked tokens

    https://arxiv.org/abs/2505.22617: under policy gradient, the entropy falls in proportion to the mean of these terms.
    """
    check_tokens(mask_BT, logprobs_BT=logprobs_BT, advantages_BT=advantages_BT)
    count = mask_BT.sum().clamp(min=1)
    columns = (fill(x, mask_BT).double() for x in (advantages_BT, logprobs_BT))
    advantage_BT, logprob_BT = (column - column.sum() / count for column in columns)
    return (advantage_BT * logprob_BT).masked_fill(~mask_BT, 0.0)


def clip_cov(
    covariance_BT: Tensor, mask_BT: Tensor, *, share: float, band: tuple[float, float], order: Callable[[int], Tensor]
) -> Tensor:
    """[B, T] bool, Clip-Cov: max(1, floor(share * n)) tokens, drawn from those with band[0] < covariance < band[1].

    https://arxiv.org/abs/2505.22617 (share = 2e-4, band = [1, 5]), which stops the gradient of the drawn tokens.
    `order(k)` is a permutation of range(k); its first entries are drawn. An empty band selects no token.
    """
    inside_BT = mask_BT & (covariance_BT > band[0]) & (covariance_BT < band[1])
    places_K2 = inside_BT.nonzero()
    drawn = order(len(places_K2))[: _count(mask_BT, share)].to(places_K2.device)
    return _mask_of(places_K2[drawn], mask_BT)


def kl_cov(covariance_BT: Tensor, mask_BT: Tensor, *, share: float) -> Tensor:
    """[B, T] bool, KL-Cov: the max(1, floor(share * n)) tokens with the highest covariance; of equal ones, the earlier.

    https://arxiv.org/abs/2505.22617 (share = 2e-3 for 7B, 2e-4 for 32B).
    """
    places_N2 = mask_BT.nonzero()
    highest = covariance_BT[mask_BT].sort(descending=True, stable=True).indices[: _count(mask_BT, share)]
    return _mask_of(places_N2[highest], mask_BT)


def penalise_tokens(loss_BT: Tensor, log_ratio_BT: Tensor, chosen_BT: Tensor, *, coefficient: float) -> Tensor:
    """[B, T], the loss, plus a KL penalty of at most K3_BOUND * coefficient at the chosen tokens.

        d    = logprobs - proximal_logprobs
        loss + coefficient * (exp(d) - 1 - d)

    The penalty is k3 of KL(proximal || current). The authors' code
    (https://github.com/PRIME-RL/Entropy-Mechanism-of-RL) uses abs(d), whose gradient in an update's first step is the
    sign of a rounding error. The gradient of k3 is 0 there.
    """
    distance_BT = fill(log_ratio_BT, chosen_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return loss_BT + coefficient * (distance_BT.expm1() - distance_BT).clamp(max=K3_BOUND)


def _count(mask_BT: Tensor, share: float) -> int:
    return max(1, math.floor(share * int(mask_BT.sum())))


def _mask_of(places_K2: Tensor, mask_BT: Tensor) -> Tensor:
    chosen_BT = torch.zeros_like(mask_BT)
    chosen_BT[places_K2[:, 0], places_K2[:, 1]] = True
    return chosen_BT


class Bonus(NamedTuple):
    """The entropy bonus: its adaptive coefficient, and its weight in the next update, either the coefficient or 0."""

    coefficient: float
    weight: float


def next_bonus(coefficient: float, entropy: float, *, target: float, step: float, within: tuple[float, float]) -> Bonus:
    """Adapt the entropy bonus: its coefficient grows, and the bonus applies, only while the entropy is too low.

        coefficient <- clamp(coefficient + step if entropy <= target else coefficient - step, *within)
        weight       = coefficient if entropy <= target else 0

    Adaptive entropy control of Skywork-OR1, https://arxiv.org/abs/2505.22312. `entropy` is the entropy in the previous
    update, in nats per token.
    """
    low = entropy <= target
    moved = min(max(coefficient + (step if low else -step), within[0]), within[1])
    return Bonus(moved, moved if low else 0.0)
