"""A custom advantage: the score minus the best other score of the same prompt.

    streamppo run configs/math.toml \
        algorithm.advantage.kind=function algorithm.advantage.function=examples/custom_advantage.py:advantage

A run calls `advantage` once for every update, with the whole batch. It gets an `AdvantageInputs`: the token rewards,
their sums, the groups, the mask, the lag of each token, and which completions were cut off. It returns [B], one number
for each trajectory, or [B, T], one for each token. With `algorithm.advantage.compares_samples = false`, a batch has
single trajectories in order of arrival instead of whole groups.
"""

import torch
from torch import Tensor

from streamppo.algorithms.custom_functions import AdvantageInputs


def advantage(inputs: AdvantageInputs) -> Tensor:
    """score - max(other scores of the group), [B]; 0 for a trajectory that is alone in its group."""
    same_BB = inputs.group_ids_B[:, None] == inputs.group_ids_B
    same_BB.fill_diagonal_(False)
    others_BB = inputs.scores_B.expand(same_BB.shape).masked_fill(~same_BB, -torch.inf)
    best_B = others_BB.amax(-1)
    return torch.where(best_B.isfinite(), inputs.scores_B - best_B, 0.0)
