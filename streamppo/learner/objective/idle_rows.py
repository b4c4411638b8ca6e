"""Rows without a gradient: the passes of an update leave them out.

    trained      no token is in the loss: all are too old, all rewards of the group are equal (zero_variance = "mask"),
                 or the completion is filtered
    advantages   zero_variance = "keep": all rewards of the group are equal, and only advantages give a gradient

Denominators, baselines and whitening are over the whole batch. The choice depends on the configuration and on the
batch without its tokens, so every rank makes the same choice before it has the tokens.

B trajectories of the batch.
"""

from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from streamppo.algorithms.groups import zero_variance
from streamppo.config import algorithm as choices
from streamppo.config.policy_loss import CustomLoss
from streamppo.config.queue import AdaptiveLag
from streamppo.config.regularisation import NoExploration
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.objective import build_correction
from streamppo.learner.objective.adaptive_lag import is_lowered_by_ess
from streamppo.learner.objective.build_correction import TRUNCATED
from streamppo.learner.objective.objective import trained_tokens

COMPARES = (choices.Grpo, choices.DrGrpo, choices.Rloo, choices.MaxRl)
"""Estimators whose advantage is 0 for a group of equal rewards."""


class IdleRows(NamedTuple):
    """The rows [B] of the steps' forward passes, and the rows scored before the first step; on the CPU.

    `idle_B` are rows with tokens in the loss, all without a gradient: a minibatch of idle rows still makes a step.
    """

    taught_B: Tensor
    scored_B: Tensor
    idle_B: Tensor

    def select(self, rows: Tensor) -> Tensor:
        """Return the `rows` of the steps' forward passes."""
        return rows[self.taught_B[rows]]


def find(config: Config, batch: PaddedBatch) -> IdleRows:
    """Find the trained and the scored rows of `batch`. If no row has a gradient, all rows pass, for the metrics."""
    # Other rules need a pass of the truncated completions too: their shares are over all.
    has_no_other_rule = _has_no_other_rule(config.algorithm)
    algorithm = config.algorithm if has_no_other_rule else structs.replace(config.algorithm, filters=())
    trained_B = trained_tokens(algorithm, batch).any(-1).cpu()
    every_B = torch.ones_like(trained_B)
    if _needs_whole_batch(config):
        return IdleRows(every_B, every_B, ~every_B)
    idle_B = ~every_B
    if _moves_by_advantage_alone(config):
        idle_B = zero_variance(batch.reward_B, batch.prompt_B).cpu() & trained_B
    taught_B = trained_B & ~idle_B
    if not taught_B.any():
        return IdleRows(every_B, every_B, ~every_B)
    return IdleRows(taught_B, every_B if _scores_all(config.algorithm) else taught_B, idle_B)


def _needs_whole_batch(config: Config) -> bool:
    """True if the lag or the learning rate follows the effective sample size of the whole batch."""
    return is_lowered_by_ess(config) or isinstance(config.queue.max_lag, AdaptiveLag)


def _scores_all(config: choices.Algorithm) -> bool:
    """True if a row's targets may depend on the scores of other rows."""
    in_reward = config.kl.reward_beta > 0 or (config.teacher.on and config.teacher.signal == "reward")
    return config.has_critic or in_reward or isinstance(config.correction, build_correction.drops.CustomCorrection)


def _moves_by_advantage_alone(config: Config) -> bool:
    """True if a token with advantage 0 has no gradient and does not influence whether a step is made."""
    algorithm = config.algorithm
    return (
        isinstance(algorithm.advantage, COMPARES)
        and not (isinstance(algorithm.advantage, choices.DrGrpo) and algorithm.advantage.baseline_shift)
        and algorithm.whiten.over in ("auto", "off")
        and not isinstance(algorithm.policy_loss, CustomLoss)
        and isinstance(algorithm.exploration, NoExploration)
        and not (algorithm.entropy or algorithm.entropy_control.target)
        and not (algorithm.kl.on or algorithm.teacher.on or algorithm.positive_nll or algorithm.target_kl)
        and _has_no_other_rule(algorithm)
    )


def _has_no_other_rule(config: choices.Algorithm) -> bool:
    """True if only the filter of truncated completions leaves tokens out of the loss."""
    return all(rule == TRUNCATED for rule in build_correction.metrics(config.correction, config.filters))
