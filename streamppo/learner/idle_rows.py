"""Rows that teach nothing: no token of theirs has a gradient, so that they leave the passes of an update.

    trained      no token is for the loss: all are too old, the group scored the same (zero_variance = "mask"), the
                 completion is filtered
    advantages   zero_variance = "keep": the group scored the same, and nothing but the advantage would move the policy

Denominators, baselines and whitening are those of the whole batch. The choice depends on the configuration and on what
a batch has beside its tokens: every rank makes it alike, before it has the tokens.

B trajectories of the batch.
"""

from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from streamppo.algorithms.groups import zero_variance
from streamppo.config import algorithm as choices
from streamppo.config.exploration import NoExploration
from streamppo.config.policy_loss import OwnLoss
from streamppo.config.queue import AdaptiveLag
from streamppo.config.sections import Config
from streamppo.learner import correction
from streamppo.learner.batch import PaddedBatch
from streamppo.learner.correction import TRUNCATED
from streamppo.learner.objective import trained_tokens
from streamppo.learner.steering import is_lowered_by_ess

COMPARES = (choices.Grpo, choices.DrGrpo, choices.Rloo, choices.MaxRl)
"""Estimators by which a trajectory whose whole group scored the same has an advantage of 0."""


class Rows(NamedTuple):
    """The rows of a batch [B] that its steps pass over, and those that are scored before them; on the CPU.

    `idle_B` are rows that have tokens for the loss, all without a gradient: a minibatch of them alone makes a step.
    """

    taught_B: Tensor
    scored_B: Tensor
    idle_B: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """Return the part of `rows` that is passed over."""
        return rows[self.taught_B[rows]]


def find(config: Config, batch: PaddedBatch) -> Rows:
    """Find the rows of `batch` that teach, and those that are scored. All pass if none teaches: they are described."""
    # The shares of rules that need a pass are over truncated completions too.
    known = _has_no_other_rule(config.algorithm)
    algorithm = config.algorithm if known else structs.replace(config.algorithm, filters=())
    trained_B = trained_tokens(algorithm, batch).any(-1).cpu()
    every_B = torch.ones_like(trained_B)
    if _is_steered(config):
        return Rows(every_B, every_B, ~every_B)
    idle_B = ~every_B
    if _moves_by_advantage_alone(config):
        idle_B = zero_variance(batch.reward_B, batch.prompt_B).cpu() & trained_B
    taught_B = trained_B & ~idle_B
    if not taught_B.any():
        return Rows(every_B, every_B, ~every_B)
    return Rows(taught_B, every_B if _scores_all(config.algorithm) else taught_B, idle_B)


def _is_steered(config: Config) -> bool:
    """True where the lag or the learning rate goes by the effective sample size of the whole batch."""
    return is_lowered_by_ess(config) or isinstance(config.queue.max_lag, AdaptiveLag)


def _scores_all(config: choices.Algorithm) -> bool:
    """True where targets of a row may depend on scores of others, or on those of the whole batch."""
    in_reward = config.kl.reward_beta > 0 or (config.teacher.on and config.teacher.signal == "reward")
    return config.has_critic or in_reward or isinstance(config.correction, correction.drops.OwnCorrection)


def _moves_by_advantage_alone(config: Config) -> bool:
    """True where a token whose advantage is 0 has no gradient, and no number that decides about a step counts it."""
    algorithm = config.algorithm
    return (
        isinstance(algorithm.advantage, COMPARES)
        and not (isinstance(algorithm.advantage, choices.DrGrpo) and algorithm.advantage.baseline_shift)
        and algorithm.whiten.over in ("auto", "off")
        and not isinstance(algorithm.policy_loss, OwnLoss)
        and isinstance(algorithm.exploration, NoExploration)
        and not (algorithm.entropy or algorithm.entropy_control.target)
        and not (algorithm.kl.on or algorithm.teacher.on or algorithm.positive_nll or algorithm.target_kl)
        and _has_no_other_rule(algorithm)
    )


def _has_no_other_rule(config: choices.Algorithm) -> bool:
    """True where nothing but the truncation of a completion leaves its tokens out of the loss."""
    return all(rule == TRUNCATED for rule in correction.metrics(config.correction, config.filters))
