"""A user's advantage function: its inputs, its call, and a trial call before the first update.

B trajectories of a whole batch, the same on every rank; T completion tokens (padded).
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamppo.algorithms.checks import check_finite
from streamppo.algorithms.masked import fill, on_last_token, sequence_sum, spread
from streamppo.algorithms.purity import check_repeatable, leaving_inputs

TRIED_SCORES = ((1.0, 0.0, 0.5), (0.0, 0.0, 0.0))
"""Scores of the trial batch, group by group; in the second group all scores are equal."""
TRIED_TOKENS = 5
"""Tokens of each response in the trial batch, padding included."""


class AdvantageInputs(NamedTuple):
    """A batch, in tensors [B] and [B, T]. An update's batch has whole groups if the advantage compares samples.

    `mask_BT` is True for tokens that the policy sampled. `rewards_BT` is 0 at all other tokens; a KL penalty in the
    reward is already subtracted. `scores_B` are its sums. `group_ids_B` are equal for the trajectories of one prompt.
    `lag_BT` is the age of a token in versions, `truncated_B` is True for truncated completions. There is no critic.
    """

    rewards_BT: Tensor
    scores_B: Tensor
    group_ids_B: Tensor
    mask_BT: Tensor
    lag_BT: Tensor
    truncated_B: Tensor


CustomAdvantage: TypeAlias = Callable[[AdvantageInputs], object]
"""inputs -> [B], an advantage for each trajectory, or [B, T], one for each token. It is a user's code, so its result is
checked."""


def custom_advantage(
    rewards_BT: Tensor,
    group_ids_B: Tensor,
    mask_BT: Tensor,
    lag_BT: Tensor,
    truncated_B: Tensor,
    *,
    function: CustomAdvantage,
) -> Tensor:
    """[B, T], the advantages returned by `function`, detached; masked tokens get 0 whatever it returns for them.

    With `function = groups.rloo(scores_B, group_ids_B)` this is RLOO. Raises `ValueError` for a result that is not a
    tensor of [B] or [B, T], for advantages of unmasked tokens that are not finite, and for a function that changes its
    inputs, which belong to the learner.
    """
    rewards_BT = fill(rewards_BT, mask_BT)
    scores_B = sequence_sum(rewards_BT, mask_BT)
    inputs = AdvantageInputs(rewards_BT, scores_B, group_ids_B, mask_BT, lag_BT, truncated_B)
    advantage = leaving_inputs(function, "advantage")(inputs)
    if not isinstance(advantage, Tensor):
        raise ValueError(f"the advantage returned a {type(advantage).__name__}, not a tensor")
    if advantage.shape not in (mask_BT.shape, scores_B.shape):
        shapes = f"[B] = {tuple(scores_B.shape)} or [B, T] = {tuple(mask_BT.shape)}"
        raise ValueError(f"the advantage has shape {tuple(advantage.shape)}; it must be {shapes}")
    advantage_BT = spread(advantage, mask_BT) if advantage.dim() == 1 else advantage
    check_finite(mask_BT, advantage=advantage_BT)
    return fill(advantage_BT, mask_BT).detach()


def try_custom_advantage(function: CustomAdvantage) -> None:
    """Call an advantage function twice on a small trial batch, in which one group has equal scores.

    Raises `ValueError` as `custom_advantage` does: such a run would fail at its first update, or at the first group
    with equal scores. Raises it also for advantages that differ between the two calls.
    """
    scores_B = torch.tensor(TRIED_SCORES).flatten()
    group_ids_B = torch.arange(len(TRIED_SCORES)).repeat_interleave(len(TRIED_SCORES[0]))
    mask_BT = torch.ones(len(scores_B), TRIED_TOKENS, dtype=torch.bool)
    mask_BT[0, -2:] = False
    mask_BT[1, 1] = False
    truncated_B = torch.arange(len(scores_B)) == 2
    columns = on_last_token(scores_B, mask_BT), group_ids_B, mask_BT, mask_BT.long(), truncated_B
    first_BT, again_BT = (custom_advantage(*columns, function=function) for _ in range(2))
    check_repeatable(first_BT, again_BT, "the advantages change")
