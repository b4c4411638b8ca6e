"""From the configuration's choices to the functions of `algorithms`: each choice is made here, once.

B trajectories, T completion tokens (padded). The learner calls what these builders return and never asks for a kind.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from streamppo.algorithms.advantages import Estimate, gae_actor_critic, whiten
from streamppo.algorithms.corrections import Correction, importance_weights
from streamppo.algorithms.layout import on_last_token
from streamppo.algorithms.policy_losses import TokenLoss, clipped
from streamppo.config import Algorithm, Clip, NoCorrection, Truncate
from streamppo.learner.model import Scored
from streamppo.learner.packing import Packed

Advantages: TypeAlias = Callable[[Packed, Scored], Estimate]
"""(batch, proximal scores) -> advantages and returns [B, T]."""
Correct: TypeAlias = Callable[[Tensor, Tensor, Tensor], Correction]
"""(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT) -> weights and kept tokens."""
PolicyLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLoss]
"""(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT) -> one loss for each token."""


class Objective(NamedTuple):
    """The functions of one run."""

    advantages: Advantages
    correct: Correct
    policy_loss: PolicyLoss


def build(config: Algorithm) -> Objective:
    """The functions that `config` chooses."""
    return Objective(_advantages(config), _correct(config), _policy_loss(config))


def _advantages(config: Algorithm) -> Advantages:
    choice = config.advantage

    def estimate(batch: Packed, proximal: Scored) -> Estimate:
        bootstraps = batch.truncated_B & choice.bootstrap_truncated
        raw = gae_actor_critic(
            on_last_token(batch.reward_B, batch.mask_BT),
            proximal.values_BT,
            batch.mask_BT,
            proximal.bootstrap_B * bootstraps,
            gamma=choice.gamma,
            lam_actor=choice.lam,
            lam_critic=choice.critic_lam,
        )
        if config.whiten == "off":
            return raw
        return raw._replace(advantages=whiten(raw.advantages, batch.mask_BT))

    return estimate


def _correct(config: Algorithm) -> Correct:
    match config.correction:
        case NoCorrection():
            return lambda proximal, behavior, mask: importance_weights(
                proximal, behavior, mask, level="token", mode="off"
            )
        case Truncate(level=level, cap=cap):
            return lambda proximal, behavior, mask: importance_weights(
                proximal, behavior, mask, level=level, mode="truncate", cap=cap
            )


def _policy_loss(config: Algorithm) -> PolicyLoss:
    match config.policy_loss:
        case Clip(low=low, high=high, dual=dual):
            return lambda logprobs, proximal, advantages, mask: clipped(
                logprobs, proximal, advantages, mask, clip_low=low, clip_high=high, dual_clip=dual or None
            )
