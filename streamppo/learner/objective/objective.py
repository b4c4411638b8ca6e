"""Builds an update's functions from the configuration. B trajectories, T completion tokens (padded)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamppo.algorithms import (
    advantages,
    corrections,
    custom_functions,
    exploration,
    groups,
    policy_losses,
    rejections,
    sequence_losses,
    vtrace,
)
from streamppo.algorithms.advantages import AdvantageEstimate
from streamppo.algorithms.masked import spread
from streamppo.algorithms.policy_losses import TokenLoss
from streamppo.config import algorithm as choices
from streamppo.config import policy_loss as losses
from streamppo.config import regularisation
from streamppo.config.correction import FilterTruncated
from streamppo.config.sections import Config
from streamppo.learner.batch.padded import PaddedBatch, row_order
from streamppo.learner.model.policy import Part, PolicyOutput
from streamppo.learner.objective import build_correction
from streamppo.learner.objective.adaptation import is_lowered_by_ess
from streamppo.learner.objective.build_correction import Correct, Filter
from streamppo.tasks import plugins

Advantages: TypeAlias = Callable[[PaddedBatch, PolicyOutput, Tensor], AdvantageEstimate]
"""(batch, proximal scores, rewards_BT) -> advantages and returns [B, T]."""
Trained: TypeAlias = Callable[[PaddedBatch], Tensor]
"""batch -> [B, T], True at tokens in the loss: within max_lag, not of a masked group or a filtered completion."""
PolicyLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], TokenLoss]
"""(logprobs_BT, proximal_logprobs_BT, behavior_logprobs_BT, advantages_BT, mask_BT) -> one loss per token."""
RatioLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], TokenLoss]
"""A policy loss without behavior log-probs: (logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)."""
Anchor: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(behavior_logprobs_BT, logprobs_BT, lag_BT, mask_BT) -> proximal log-probs, without gradient."""


class Exploration(NamedTuple):
    """The exploration `choice` of a run with `seed`."""

    choice: regularisation.TopEntropy | regularisation.ClipCov | regularisation.KlCov
    seed: int

    def choose(self, batch: PaddedBatch, proximal: PolicyOutput, advantages_BT: Tensor, trained_BT: Tensor) -> Tensor:
        """Select tokens of a batch, [B, T] bool, by the proximal policy's scores."""
        choice = self.choice
        if isinstance(choice, regularisation.TopEntropy):
            return exploration.high_entropy_mask(proximal.entropy_BT, trained_BT, share=choice.share)
        covariance_BT = exploration.covariance(proximal.logprobs_BT, advantages_BT, trained_BT)
        if isinstance(choice, regularisation.KlCov):
            return exploration.kl_cov(covariance_BT, trained_BT, share=choice.share)
        # Epochs are numbered from 0, so -1 makes the draw independent of every epoch's row order.
        order = partial(row_order, seed=self.seed, version=batch.version, epoch=-1)
        return exploration.clip_cov(covariance_BT, trained_BT, share=choice.share, band=choice.band, order=order)

    def treat(self, loss_BT: Tensor, log_ratio_BT: Tensor, chosen_BT: Tensor) -> Tensor:
        """Return the policy losses [B, T] with a change at the chosen tokens, by log(current / proximal).

        The denominator of the loss still counts tokens whose loss becomes 0.
        """
        match self.choice:
            case regularisation.TopEntropy():
                return loss_BT.masked_fill(~chosen_BT, 0.0)
            case regularisation.ClipCov():
                return loss_BT.masked_fill(chosen_BT, 0.0)
            case regularisation.KlCov(coefficient=coefficient):
                return exploration.penalise_tokens(loss_BT, log_ratio_BT, chosen_BT, coefficient=coefficient)


class Epoch(NamedTuple):
    """One epoch over the batch: the part that it trains and its number of steps. `number` counts from 0 per part."""

    part: Part
    number: int
    minibatches: int
    max_grad_norm: float


class Objective(NamedTuple):
    """The functions and the epochs of one run.

    The scores of the part `scored` are computed for the whole batch before the first step. `anchor` computes the
    proximal log-probs of a micro-batch in the step's own pass; if it is None, they are computed before the first step.
    `one_step`: the policy makes one step per batch. `rules` are the metrics of all rules (of the correction and the
    `filters`) that leave tokens out of the policy's loss.
    """

    advantages: Advantages
    trained: Trained
    correct: Correct
    filters: Mapping[str, Filter]
    rules: Sequence[str]
    policy_loss: PolicyLoss
    exploration: Exploration | None
    anchor: Anchor | None
    scored: Part | None
    epochs: tuple[Epoch, ...]
    one_step: bool

    @property
    def scores_policy(self) -> bool:
        return self.scored in ("policy", "both")

    def warm_up(self) -> "Objective":
        """The objective of warm-up, when the policy is frozen: only the epochs of a critic with separate steps remain.

        The policy passes over a batch once, for its metrics. With a value head, which shares the policy's passes, the
        objective does not change.
        """
        if self.epochs[-1].part != "critic":
            return self
        epochs = tuple(epoch for epoch in self.epochs if epoch.part == "critic")
        return self._replace(anchor=None, scored="both", epochs=epochs, one_step=False)

    def critic_epochs(self) -> list[Epoch]:
        """The critic's epochs, to be made with a frozen policy."""
        part = self.epochs[-1].part
        return [epoch._replace(part="critic") for epoch in self.epochs if epoch.part == part]


def build(config: Config) -> Objective:
    """Build the functions and epochs of `config`."""
    choice, explored, one_step = config.algorithm, config.algorithm.exploration, config.learner.steps == 1
    anchor = _anchor(choice, one_step=one_step and not is_lowered_by_ess(config))
    scored: Part | None = "critic" if choice.has_critic else None
    if anchor is None or choice.needs_proximal_first:
        scored = "both" if choice.has_critic else "policy"
    return Objective(
        advantages=partial(_whiten, _advantages(choice.advantage), choice.whiten, choice.has_critic),
        trained=partial(trained_tokens, choice),
        correct=build_correction.build(choice.correction),
        filters=build_correction.filters_of(choice.filters),
        rules=build_correction.metrics(choice.correction, choice.filters),
        policy_loss=_policy_loss(choice),
        exploration=None if isinstance(explored, regularisation.NoExploration) else Exploration(explored, config.seed),
        anchor=anchor,
        scored=scored,
        epochs=_epochs(config),
        one_step=one_step,
    )


def _anchor(choice: choices.Algorithm, *, one_step: bool) -> Anchor | None:
    """The function for proximal log-probs in a step's pass; None if they need a pass before the first step."""
    match choice.proximal:
        case "loglinear":
            return corrections.loglinear_proximal
        case "behavior":
            return corrections.behavior_as_proximal
        case "recompute":
            return corrections.current_as_proximal if one_step and not choice.needs_proximal_first else None


def _epochs(config: Config) -> tuple[Epoch, ...]:
    learner, critic = config.learner, config.algorithm.critic
    separate = config.algorithm.has_critic and critic.model != "head"
    part: Part = "both" if config.algorithm.has_critic and not separate else "policy"
    epochs = [Epoch(part, n, learner.minibatches, learner.max_grad_norm) for n in range(learner.epochs)]
    if separate:
        minibatches, bound = critic.minibatches or learner.minibatches, critic.max_grad_norm or learner.max_grad_norm
        epochs += [Epoch("critic", n, minibatches, bound) for n in range(critic.epochs or learner.epochs)]
    return tuple(epochs)


def _whiten(
    raw: Advantages,
    config: choices.Whiten,
    has_critic: bool,
    batch: PaddedBatch,
    proximal: PolicyOutput,
    rewards_BT: Tensor,
) -> AdvantageEstimate:
    estimate = raw(batch, proximal, rewards_BT)
    over = ("batch" if has_critic else "off") if config.over == "auto" else config.over
    if over == "off":
        return estimate
    white = advantages.whiten(
        estimate.advantages,
        batch.mask_BT,
        shift_mean=config.shift_mean,
        unbiased=config.unbiased,
        group_ids_B=batch.prompt_B if over == "group" else None,
    )
    return estimate._replace(advantages=white)


def _advantages(choice: choices.Advantage) -> Advantages:
    match choice:
        case choices.Gae():
            return partial(_gae, choice)
        case choices.VTrace():
            return partial(_vtrace, choice)
        case choices.SequenceLevel():
            return lambda batch, proximal, rewards_BT: advantages.sequence_level(
                _scores(batch, rewards_BT), proximal.values_BT[:, 0], batch.mask_BT
            )
        case choices.Grpo(unbiased=unbiased):
            return partial(_group_advantages, partial(groups.grpo, unbiased=unbiased))
        case choices.DrGrpo(baseline_shift=shift):
            return partial(_group_advantages, partial(groups.dr_grpo, baseline_shift=shift))
        case choices.Rloo():
            return partial(_group_advantages, groups.rloo)
        case choices.MaxRl():
            return partial(_group_advantages, groups.maxrl)
        case choices.ReinforcePlusPlus(gamma=gamma):
            return lambda batch, _, rewards_BT: _no_critic(
                groups.reinforce_plus_plus(rewards_BT, batch.mask_BT, gamma=gamma)
            )
        case choices.ReinforcePlusPlusBaseline():
            return lambda batch, _, rewards_BT: _no_critic(
                groups.reinforce_plus_plus_baseline(_scores(batch, rewards_BT), batch.prompt_B, batch.mask_BT)
            )
        case choices.Gdpo(weights=weights, unbiased=unbiased):
            gdpo = partial(groups.gdpo, weights=weights, unbiased=unbiased)
            return lambda batch, *_: _no_critic(spread(gdpo(batch.components_B, batch.prompt_B), batch.mask_BT))
        case choices.CustomAdvantage(function=name):
            field, attempt = "algorithm.advantage.function", custom_functions.try_custom_advantage
            custom = partial(custom_functions.custom_advantage, function=plugins.load_and_try(name, field, attempt))
            return lambda batch, _, rewards_BT: _no_critic(
                custom(rewards_BT, batch.prompt_B, batch.mask_BT, batch.lag_BT, batch.truncated_B)
            )


def _gae(choice: choices.Gae, batch: PaddedBatch, proximal: PolicyOutput, rewards_BT: Tensor) -> AdvantageEstimate:
    lam: float | Tensor = choice.lam
    if choice.adaptive_alpha:
        lam = advantages.adaptive_lambda(batch.mask_BT.sum(-1), choice.adaptive_alpha)
    return advantages.gae_actor_critic(
        rewards_BT,
        proximal.values_BT,
        batch.mask_BT,
        _bootstrap(choice, batch, proximal),
        gamma=choice.gamma,
        lam_actor=lam,
        lam_critic=choice.critic_lam,
    )


def _vtrace(
    choice: choices.VTrace, batch: PaddedBatch, proximal: PolicyOutput, rewards_BT: Tensor
) -> AdvantageEstimate:
    log_rho_BT = vtrace.log_rho(proximal.logprobs_BT, batch.behavior_logprobs_BT, batch.mask_BT, lag_BT=batch.lag_BT)
    return vtrace.vtrace(
        rewards_BT,
        proximal.values_BT,
        batch.mask_BT,
        _bootstrap(choice, batch, proximal),
        log_rho_BT,
        gamma=choice.gamma,
        lam=choice.lam,
        clip=vtrace.TraceClip(*choice.clip, choice.trace),
    )


def _bootstrap(choice: choices.Bootstrapped, batch: PaddedBatch, proximal: PolicyOutput) -> Tensor:
    """[B], the value after the last token of cut segments and, if configured, of truncated completions; else 0."""
    return proximal.bootstrap_B * (batch.cut_B | (batch.truncated_B & choice.bootstrap_truncated))


def _group_advantages(
    compare: Callable[[Tensor, Tensor], Tensor], batch: PaddedBatch, proximal: PolicyOutput, rewards_BT: Tensor
) -> AdvantageEstimate:
    return _no_critic(spread(compare(_scores(batch, rewards_BT), batch.prompt_B), batch.mask_BT))


def _no_critic(advantages_BT: Tensor) -> AdvantageEstimate:
    return AdvantageEstimate(advantages_BT, torch.zeros_like(advantages_BT))


def _scores(batch: PaddedBatch, rewards_BT: Tensor) -> Tensor:
    return rewards_BT.masked_fill(~batch.mask_BT, 0.0).sum(-1)


def trained_tokens(config: choices.Algorithm, batch: PaddedBatch) -> Tensor:
    """[B, T], True at the tokens of `batch` in the loss."""
    trained_BT = batch.fresh_BT
    if config.zero_variance == "mask":
        trained_BT = trained_BT & ~groups.zero_variance(batch.reward_B, batch.prompt_B)[:, None]
    if any(isinstance(choice, FilterTruncated) for choice in config.filters):
        trained_BT = trained_BT & ~rejections.truncated_tokens(batch.truncated_B, batch.mask_BT)
    return trained_BT


def _policy_loss(config: choices.Algorithm) -> PolicyLoss:
    if isinstance(config.policy_loss, losses.CustomLoss):
        field = "algorithm.policy_loss.function"
        function = plugins.load_and_try(config.policy_loss.function, field, custom_functions.try_custom_loss)
        return partial(custom_functions.custom_loss, function=function)
    ratio_loss = _ratio_loss(config.policy_loss)
    return lambda logprobs_BT, proximal_BT, _behavior, *rest: ratio_loss(logprobs_BT, proximal_BT, *rest)


def _ratio_loss(choice: losses.RatioLoss) -> RatioLoss:
    match choice:
        case losses.Clip(range=(low, high), dual=dual):
            return partial(policy_losses.clipped, clip_low=low, clip_high=high, dual_clip=dual or None)
        case losses.Cispo(range=(low, high)):
            return partial(policy_losses.cispo, clip_low=low, clip_high=high)
        case losses.Gspo() | losses.Gmpo() | losses.Vespo() | losses.SequenceClip() as of_responses:
            return _sequence_loss(of_responses)
        case losses.Reinforce():
            return policy_losses.reinforce
        case losses.ImportanceWeighted():
            return policy_losses.importance_weighted
        case losses.DppoTv(delta=delta):
            return partial(policy_losses.dppo_tv, delta=delta)
        case losses.DppoKl(delta=delta):
            return partial(policy_losses.dppo_kl, delta=delta)
        case losses.Ipo(eps=eps):
            return partial(policy_losses.ipo, eps=eps)
        case losses.Sapo(tau=(positive, negative)):
            return partial(policy_losses.sapo, tau_positive=positive, tau_negative=negative)


def _sequence_loss(choice: losses.SequenceLoss) -> RatioLoss:
    match choice:
        case losses.Gspo(range=(low, high)):
            return partial(sequence_losses.gspo, clip_low=low, clip_high=high)
        case losses.Gmpo(range=(low, high)):
            return partial(sequence_losses.gmpo, log_low=low, log_high=high)
        case losses.Vespo(positive=positive, negative=negative):
            return partial(sequence_losses.vespo, positive=positive, negative=negative)
        case losses.SequenceClip(range=(low, high)):
            return partial(sequence_losses.sequence_clipped, clip_low=low, clip_high=high)
