"""Advantages without a critic: a trajectory is compared with the other trajectories of its prompt.

B sequences, T response tokens (padded). `scores_B` is one score per trajectory. `group_ids_B` are any integers that are
equal within a group. A trajectory that is alone in its group has advantage 0 before whitening. A group must not be
split: compute these advantages before the batch is divided over ranks.

In the formulas, mean and std are over the scores of the trajectory's group, and n is the group's size.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.advantages import whiten
from streamppo.algorithms.masked import at_least_float32, check_tokens, fill, spread
from streamppo.algorithms.scan import group_sums, leaders, reverse_scan

STD_FLOOR = 1e-6
"""Added to a group's standard deviation in `grpo`, so that a group of equal scores gets 0 instead of NaN."""


class GroupStats(NamedTuple):
    """[B] each, float64: a trajectory's score minus its group's mean, the group's mean, and the group's size."""

    centred: Tensor
    mean: Tensor
    size: Tensor


def check_scores(scores_B: Tensor, group_ids_B: Tensor) -> None:
    """Raise ValueError unless each trajectory has one finite score and one group."""
    if scores_B.dim() != 1 or scores_B.shape != group_ids_B.shape:
        raise ValueError(f"scores {tuple(scores_B.shape)} and group_ids {tuple(group_ids_B.shape)} must both be [B]")
    if not bool(scores_B.isfinite().all()):
        raise ValueError(f"scores must be finite, got {scores_B}")


def compare(scores_B: Tensor, group_ids_B: Tensor) -> GroupStats:
    """Compare each trajectory with the mean of its group."""
    check_scores(scores_B, group_ids_B)
    scores_B = scores_B.double()
    total_B, size_B = group_sums(torch.stack([scores_B, torch.ones_like(scores_B)]), group_ids_B)
    mean_B = total_B / size_B
    return GroupStats(scores_B - mean_B, mean_B, size_B)


def zero_variance(scores_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """[B] bool: True if all scores of the trajectory's group are equal, so the group has no learning signal."""
    check_scores(scores_B, group_ids_B)
    differs_B = scores_B != scores_B[leaders(group_ids_B)]
    return group_sums(differs_B.double()[None], group_ids_B)[0] == 0


def grpo(scores_B: Tensor, group_ids_B: Tensor, *, unbiased: bool = True) -> Tensor:
    """[B], GRPO: a score's distance from the mean of its group, in standard deviations of the group.

        advantages = (score - mean) / (std + STD_FLOOR)

    https://arxiv.org/abs/2402.03300. With `unbiased` the variance is divided by n - 1, as the published trainers do.
    Without the division by std this is `dr_grpo`.
    """
    centred_B, _, size_B = compare(scores_B, group_ids_B)
    divisor_B = (size_B - 1).clamp(min=1) if unbiased else size_B
    std_B = (group_sums(centred_B.square()[None], group_ids_B)[0] / divisor_B).sqrt()
    return (centred_B / (std_B + STD_FLOOR)).to(at_least_float32(scores_B).dtype)


def gdpo(
    components_B: Mapping[str, Tensor], group_ids_B: Tensor, *, weights: Mapping[str, float], unbiased: bool = True
) -> Tensor:
    """[B], GDPO: each component of the reward is normalised within its group before the components are added.

        sum        = sum_k(weights_k * grpo(components_k))
        advantages = (sum - mean(sum)) / (std(sum) + STD_FLOOR)        mean and std over the batch

    https://arxiv.org/abs/2601.05242. No component dominates by its spread. With one component this is GRPO, normalised
    over the batch. Raises ValueError if a trajectory or the whole batch lacks a component.
    """
    total_B = torch.zeros(group_ids_B.shape, dtype=torch.float64, device=group_ids_B.device)
    for name, weight in weights.items():
        if name not in components_B:
            raise ValueError(
                f"no trajectory has the component {name!r} (there are {', '.join(components_B) or 'none'})"
            )
        if bool(components_B[name].isnan().any()):
            raise ValueError(f"trajectory {int(components_B[name].isnan().nonzero()[0])} lacks the component {name!r}")
        total_B += weight * grpo(components_B[name].double(), group_ids_B, unbiased=unbiased)
    centred_B = total_B - total_B.mean()
    divisor = max(1, len(total_B) - 1) if unbiased else len(total_B)
    return (centred_B / ((centred_B.square().sum() / divisor).sqrt() + STD_FLOOR)).float()


def dr_grpo(scores_B: Tensor, group_ids_B: Tensor, *, baseline_shift: float = 0.0) -> Tensor:
    """[B], Dr. GRPO: GRPO without the division by std.

        advantages = score - (mean + baseline_shift)

    https://arxiv.org/abs/2503.20783, where the loss is aggregated with "constant". A negative `baseline_shift` gives
    asymmetric REINFORCE, https://arxiv.org/abs/2506.20520: high scores of old data weigh more than low scores, and
    groups of equal scores have a gradient too.
    """
    centred_B = compare(scores_B, group_ids_B).centred
    shifted_B = centred_B - baseline_shift if baseline_shift else centred_B
    return shifted_B.to(at_least_float32(scores_B).dtype)


def rloo(scores_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """[B], RLOO: the baseline is the mean of the OTHER scores, which does not depend on the trajectory.

        advantages = score - (n * mean - score) / (n - 1)
                   = (score - mean) * n / (n - 1)

    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740. `dr_grpo` is smaller by the factor (n - 1) / n.
    """
    centred_B, _, size_B = compare(scores_B, group_ids_B)
    return (centred_B * size_B / (size_B - 1).clamp(min=1)).to(at_least_float32(scores_B).dtype)


def maxrl(scores_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """[B], MaxRL: maximise the log-likelihood of success instead of the mean score.

        advantages = (score - mean) / mean        0 where mean = 0

    https://arxiv.org/abs/2602.02710: for 0/1 scores, the gradient is that of the log pass rate up to order n, so a
    prompt has the weight 1 / pass rate. Raises ValueError on negative scores.
    """
    if bool((scores_B < 0).any()):
        raise ValueError(f"MaxRL needs scores >= 0 (a success rate), got {float(scores_B.min())}")
    centred_B, mean_B, _ = compare(scores_B, group_ids_B)
    scaled_B = torch.where(mean_B > 0, centred_B / mean_B.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return scaled_B.to(at_least_float32(scores_B).dtype)


def returns_to_go(rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float) -> Tensor:
    """[B, T], the discounted sum of rewards: returns_t = rewards_t + gamma * returns_{t+1}, over unmasked tokens."""
    check_tokens(mask_BT, rewards_BT=rewards_BT)
    rewards_BT = fill(rewards_BT, mask_BT)
    return reverse_scan(rewards_BT, torch.full_like(rewards_BT, gamma), mask_BT)


def reinforce_plus_plus(rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float) -> Tensor:
    """[B, T], REINFORCE++: returns-to-go, whitened over the tokens of the whole batch.

        advantages = whiten(returns_to_go(rewards))

    Hu et al. 2025, https://arxiv.org/abs/2501.03262. With gamma = 1 and only a final reward, every token has its
    trajectory's whitened score.
    """
    return whiten(returns_to_go(rewards_BT, mask_BT, gamma=gamma), mask_BT)


def reinforce_plus_plus_baseline(scores_B: Tensor, group_ids_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T], REINFORCE++-baseline: the group's mean as baseline, the BATCH's std as scale.

        advantages = whiten(score - mean)

    https://arxiv.org/abs/2501.03262. Without whitening this is `dr_grpo`.
    """
    return whiten(spread(dr_grpo(scores_B, group_ids_B), mask_BT), mask_BT)
