"""The constants of the update on one batch. B trajectories of the batch, T completion tokens (padded)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.advantages import AdvantageEstimate, outcomes_explained
from streamppo.algorithms.corrections import Correction
from streamppo.algorithms.kl import kl_advantages, kl_reward
from streamppo.algorithms.masked import check_any, check_finite, check_logprobs
from streamppo.config.algorithm import Algorithm, Bootstrapped
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import PaddedBatch, flatten_column
from streamppo.learner.device import to_device
from streamppo.learner.model.policy import PolicyOutput
from streamppo.learner.objective.objective import Objective
from streamppo.types import TokenRecord


class Frozen(NamedTuple):
    """[B, T] log-probs by the frozen models, from passes of all ranks or from a server; None without the model."""

    reference_BT: Tensor | None
    teacher_BT: Tensor | None


def teacher_logprobs_from_batch(batch: PaddedBatch) -> Tensor:
    """[B, T] log-probs of a teacher's server, from the trajectories. Raises `ValueError` if one has none."""
    logprobs_BT = batch.teacher_logprobs_BT
    lacking_BT = batch.mask_BT if logprobs_BT is None else batch.mask_BT & logprobs_BT.isnan()
    if logprobs_BT is None or lacking_BT.any():
        raise ValueError(
            f"{int(lacking_BT.any(dim=1).sum())} of {len(lacking_BT)} trajectories have no log-probs of a teacher: "
            "they were sampled without algorithm.teacher.url"
        )
    return logprobs_BT


class Targets(NamedTuple):
    """The constants of the update on one batch, all [B, T] on every rank.

    `trained_BT` is True for tokens in the loss (`Objective.trained`). Without a `correction`, each step computes
    proximal log-probs and weights in its own pass (`Objective.anchor`). `chosen_BT` is True for the tokens that
    `Objective.exploration` selects. `right_BT` is True for the trained tokens of right answers, for `positive_nll`.

    `explained` is the share of outcomes that the critic explains (`outcomes_explained`), if segments are cut by length.
    If it is too small, `policy_waits` is True, and only the critic is trained on the batch.
    """

    scored: PolicyOutput
    estimate: AdvantageEstimate
    correction: Correction | None
    trained_BT: Tensor
    reference_BT: Tensor | None
    chosen_BT: Tensor | None
    teacher_BT: Tensor | None
    right_BT: Tensor | None
    explained: float | None = None
    policy_waits: bool = False


def compute_targets(
    objective: Objective,
    config: Config,
    batch: PaddedBatch,
    scored: PolicyOutput,
    frozen: Frozen,
    scored_B: Tensor,
    *,
    beta: float,
) -> Targets:
    """Compute the targets of `batch` from the scores of its rows `scored_B`; `beta` weights the KL in the reward.

    Raises `ValueError` for data that must not be trained on.
    """
    mask_BT = batch.mask_BT
    check_any(mask_BT)
    check_logprobs(mask_BT, proximal=scored.logprobs_BT, behavior=batch.behavior_logprobs_BT)
    check_finite(mask_BT, rewards=batch.rewards_BT, values=scored.values_BT)
    check_finite(torch.ones_like(batch.truncated_B), bootstrap=scored.bootstrap_B)
    for name, frozen_BT in (("reference", frozen.reference_BT), ("teacher", frozen.teacher_BT)):
        if frozen_BT is not None:
            check_logprobs(mask_BT, **{name: frozen_BT})
    trained_BT = objective.trained(batch)
    rewards_BT = _rewards(config.algorithm, batch, scored, frozen, beta)
    estimate = _with_teacher(config.algorithm, objective.advantages(batch, scored, rewards_BT), batch, scored, frozen)
    correction = None
    if objective.anchor is None:
        # A row without a score gets the ratio 1.
        is_scored_B1, behavior_BT = to_device(scored_B, mask_BT.device)[:, None], batch.behavior_logprobs_BT
        logprobs_BT = torch.where(is_scored_B1, scored.logprobs_BT, behavior_BT)
        correction = objective.correct(logprobs_BT, behavior_BT, estimate.advantages, batch.lag_BT, mask_BT, trained_BT)
    chosen_BT = None
    if objective.exploration is not None:
        chosen_BT = objective.exploration.choose(batch, scored, estimate.advantages, trained_BT)
    right_BT = correct_answer_mask(batch, config) & trained_BT if config.algorithm.positive_nll else None
    explained = _explained(config, batch, scored, rewards_BT)
    waits = explained is not None and explained < (config.queue.least_explained or -math.inf)
    masks = trained_BT, frozen.reference_BT, chosen_BT, frozen.teacher_BT, right_BT
    return Targets(scored, estimate, correction, *masks, explained, waits)


def per_token_record(
    objective: Objective, config: Config, batch: PaddedBatch, targets: Targets, scored_B: Tensor
) -> TokenRecord:
    """The archive's numbers per token, from the pass before the first step; NaN for rows outside of `scored_B`."""
    scored, is_kept = targets.scored, config.archive.numbers
    has_logprobs = is_kept and objective.scores_policy
    logprobs_BT = scored.logprobs_BT.masked_fill(~to_device(scored_B, batch.mask_BT.device)[:, None], torch.nan)
    return TokenRecord(
        values=flatten_column(scored.values_BT, batch.length_B) if config.algorithm.has_critic else b"",
        proximal_logprobs=flatten_column(logprobs_BT, batch.length_B) if has_logprobs else b"",
        advantages=flatten_column(targets.estimate.advantages, batch.length_B) if is_kept else b"",
    )


def correct_answer_mask(batch: PaddedBatch, config: Config) -> Tensor:
    """[B, T], True at the tokens of right answers that the policy sampled."""
    return batch.mask_BT & (batch.reward_B >= config.reward.correct_at)[:, None]


def _rewards(config: Algorithm, batch: PaddedBatch, scored: PolicyOutput, frozen: Frozen, beta: float) -> Tensor:
    rewards_BT, logprobs_BT, mask_BT = batch.rewards_BT, scored.logprobs_BT, batch.mask_BT
    if frozen.reference_BT is not None and config.kl.reward_beta:
        kind = config.kl.reward_estimator
        rewards_BT = kl_reward(rewards_BT, logprobs_BT, frozen.reference_BT, mask_BT, beta=beta, kind=kind)
    if frozen.teacher_BT is not None and config.teacher.signal == "reward":
        rewards_BT = kl_reward(rewards_BT, logprobs_BT, frozen.teacher_BT, mask_BT, beta=config.teacher.weight)
    return rewards_BT


def _explained(config: Config, batch: PaddedBatch, scored: PolicyOutput, rewards_BT: Tensor) -> float | None:
    choice, segments = config.algorithm.advantage, config.queue.segments
    if segments is None or not segments.max_tokens or not isinstance(choice, Bootstrapped):
        return None
    if not (batch.cut_B | (batch.prefix_B > 0)).any():
        return None
    known_B = ~batch.cut_B & ~(batch.truncated_B & choice.bootstrap_truncated)
    return outcomes_explained(rewards_BT, scored.values_BT, batch.mask_BT, known_B, gamma=choice.gamma)


def _with_teacher(
    config: Algorithm, estimate: AdvantageEstimate, batch: PaddedBatch, scored: PolicyOutput, frozen: Frozen
) -> AdvantageEstimate:
    if frozen.teacher_BT is None or config.teacher.signal != "advantage":
        return estimate
    columns, teacher = (estimate.advantages, scored.logprobs_BT, frozen.teacher_BT, batch.mask_BT), config.teacher
    return estimate._replace(advantages=kl_advantages(*columns, weight=teacher.weight, others=teacher.others))
