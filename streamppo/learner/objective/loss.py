"""The loss of a micro-batch. B trajectories of the batch, b rows of a micro-batch, T completion tokens (padded)."""

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.aggregate import Denominators, aggregate
from streamppo.algorithms.corrections import Correction, scale_negatives
from streamppo.algorithms.diagnostics import update_sums
from streamppo.algorithms.kl import kl_loss, policy_weights
from streamppo.algorithms.policy_losses import positive_nll
from streamppo.algorithms.value_losses import value_loss
from streamppo.config.algorithm import Algorithm
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.model.policy import Part, PolicyOutput
from streamppo.learner.objective.build_correction import filter_metric, rejection_metric
from streamppo.learner.objective.metrics import PolicyPass, Sums
from streamppo.learner.objective.objective import Objective
from streamppo.learner.objective.targets import Targets
from streamppo.process import phase

NO_COUNTS = Denominators(tokens=1.0, sequences=1.0)


class MicroBatchLoss(NamedTuple):
    """A micro-batch's share of its minibatch: a differentiable loss, and sums to add over micro-batches and ranks.

    `policy_pass` is None for an empty micro-batch and for a pass of only the critic.
    """

    loss: Tensor
    sums: Sums
    policy_pass: PolicyPass | None


class TokenTerms(NamedTuple):
    """[b, T] each: the terms of the policy's loss; `left_out` maps a rule's metric to the tokens it leaves out.

    The loss of a token is `loss_bT * weights_bT` if the token is kept, else 0.
    """

    proximal_bT: Tensor
    weights_bT: Tensor
    ratio_bT: Tensor
    clipped_bT: Tensor
    loss_bT: Tensor
    kept_bT: Tensor
    left_out: Mapping[str, Tensor]


class Loss(NamedTuple):
    """The losses of one update; `entropy_weight` is the weight of the entropy bonus."""

    objective: Objective
    algorithm: Algorithm
    batch: PaddedBatch
    targets: Targets
    entropy_weight: float

    def terms(self, rows: Tensor, current: PolicyOutput) -> TokenTerms:
        """The terms of the policy's loss for each token of `rows`, which have the scores `current`."""
        return _MicroBatch(self, rows, current, NO_COUNTS).terms()

    @phase("loss")
    def share(self, rows: Tensor, part: Part, current: PolicyOutput, counts: Denominators) -> MicroBatchLoss:
        """The share of `rows`, which have the scores `current`, in the loss of a minibatch with the global `counts`."""
        if not len(rows):
            return MicroBatchLoss(_zero_gradient(part, current), Sums.zero(current.logprobs_BT.device), None)
        piece = _MicroBatch(self, rows, current, counts)
        match part:
            case "policy":
                return piece.policy()
            case "critic":
                return piece.critic()
            case "both":
                policy, critic = piece.policy(), piece.critic()
                return policy._replace(loss=policy.loss + critic.loss, sums=policy.sums.plus(critic.sums))


class _MicroBatch(NamedTuple):
    update: Loss
    rows: Tensor
    current: PolicyOutput
    counts: Denominators

    def policy(self) -> MicroBatchLoss:
        """The policy's loss, minus its entropy bonus, plus the KL to the reference and the NLL of right answers."""
        config, trained_bT, logprobs_bT = self.update.algorithm, self.trained_bT, self.current.logprobs_BT
        terms = self.terms()
        proximal_bT, weights_bT, kept_bT = terms.proximal_bT, terms.weights_bT, terms.kept_bT
        # masked_fill, not times 0: the loss of a token that is left out may be NaN or infinite.
        loss = self.average((terms.loss_bT * weights_bT).masked_fill(~kept_bT, 0.0))
        entropy_bT = self.current.entropy_BT
        total = loss - self.update.entropy_weight * self.average(entropy_bT)
        if self.update.targets.reference_BT is not None and config.kl.loss_beta:
            # The KL is over the current policy's tokens; current / behavior is the product of the two weights.
            current_bT = weights_bT * policy_weights(logprobs_bT, proximal_bT, trained_bT)
            divergence_bT = self.divergence(self.update.targets.reference_BT)
            total = total + config.kl.loss_beta * self.average(current_bT * divergence_bT)
        if self.update.targets.right_BT is not None:
            right_bT = self.slice_rows(self.update.targets.right_BT)
            total = total + config.positive_nll * positive_nll(logprobs_bT, right_bT, self.counts.right_tokens)
        logprobs_bT = logprobs_bT.detach()
        tokens_5 = update_sums(logprobs_bT, proximal_bT, trained_bT, terms.clipped_bT)
        sums = Sums.of_policy(loss, tokens_5, entropy_bT.masked_fill(~trained_bT, 0.0).double().sum())
        ratio_bT, left_out = terms.ratio_bT.float(), terms.left_out
        return MicroBatchLoss(
            total, sums, PolicyPass(self.rows, logprobs_bT.float(), ratio_bT, kept_bT.sum(), left_out)
        )

    def terms(self) -> TokenTerms:
        trained_bT, logprobs_bT = self.trained_bT, self.current.logprobs_BT
        advantages_bT = self.slice_rows(self.update.targets.estimate.advantages)
        behavior_bT = self.slice_rows(self.update.batch.behavior_logprobs_BT)
        proximal_bT, correction = self.proximal_and_correction(behavior_bT, advantages_bT)
        weights_bT, columns = correction.weights, (proximal_bT, behavior_bT, advantages_bT, trained_bT)
        tokens = self.update.objective.policy_loss(logprobs_bT, *columns)
        signed_bT = scale_negatives(tokens.loss, advantages_bT, negative=self.update.algorithm.negative_weight)
        loss_bT = self.apply_exploration(signed_bT, logprobs_bT - proximal_bT)
        left_out = self.filter_masks(advantages_bT)
        kept_bT = trained_bT & (weights_bT != 0) & ~reduce(or_, left_out.values(), torch.zeros_like(trained_bT))
        left_out = {rejection_metric(name): dropped_bT for name, dropped_bT in correction.dropped.items()} | left_out
        return TokenTerms(proximal_bT, weights_bT, tokens.ratio, tokens.clipped, loss_bT, kept_bT, left_out)

    def critic(self) -> MicroBatchLoss:
        config, targets = self.update.algorithm.critic, self.update.targets
        critic_loss = value_loss(
            self.current.values_BT,
            self.slice_rows(targets.scored.values_BT),
            self.slice_rows(targets.estimate.returns),
            self.trained_bT,
            clip=config.clip or None,
            kind=config.loss,
            huber_delta=config.huber or 1.0,
        )
        loss = self.average(critic_loss.loss)
        sums = Sums.of_critic(loss, self.trained_bT.sum(), critic_loss.clipped.sum())
        return MicroBatchLoss(config.coefficient * loss, sums, None)

    @property
    def trained_bT(self) -> Tensor:
        return self.slice_rows(self.update.targets.trained_BT)

    def slice_rows(self, batch_BT: Tensor) -> Tensor:
        return batch_BT[self.rows, : self.current.logprobs_BT.shape[1]]

    def average(self, loss_bT: Tensor) -> Tensor:
        """The share of `loss_bT` in the minibatch's average; a response's length includes tokens beyond max_lag."""
        batch, kind = self.update.batch, self.update.algorithm.aggregation
        lengths_b = batch.mask_BT[self.rows].sum(-1)
        return aggregate(loss_bT, self.trained_bT, kind, self.counts, lengths_b, batch.prompt_B[self.rows])

    def filter_masks(self, advantages_bT: Tensor) -> dict[str, Tensor]:
        """[b, T] each, the tokens that each filter leaves out of the policy's loss, by the filter's metric."""
        batch, logprobs_bT = self.update.batch, self.current.logprobs_BT.detach()
        behavior_bT, mask_bT = self.slice_rows(batch.behavior_logprobs_BT), self.slice_rows(batch.mask_BT)
        columns = batch.truncated_B[self.rows], logprobs_bT, behavior_bT, advantages_bT, mask_bT
        return {filter_metric(name): leaves_out(*columns) for name, leaves_out in self.update.objective.filters.items()}

    def proximal_and_correction(self, behavior_bT: Tensor, advantages_bT: Tensor) -> tuple[Tensor, Correction]:
        """Proximal log-probs and their correction, from `targets` or, if it has none, from this pass's log-probs."""
        objective, targets, batch = self.update.objective, self.update.targets, self.update.batch
        if targets.correction is not None:
            weights_BT, keep_BT, dropped = targets.correction
            dropped = {name: self.slice_rows(dropped_BT) for name, dropped_BT in dropped.items()}
            correction = Correction(self.slice_rows(weights_BT), self.slice_rows(keep_BT), dropped)
            return self.slice_rows(targets.scored.logprobs_BT), correction
        assert objective.anchor is not None
        lag_bT, mask_bT = self.slice_rows(batch.lag_BT), self.slice_rows(batch.mask_BT)
        proximal_bT = objective.anchor(behavior_bT, self.current.logprobs_BT, lag_bT, mask_bT)
        columns = behavior_bT, advantages_bT, lag_bT, mask_bT, self.trained_bT
        return proximal_bT, objective.correct(proximal_bT, *columns)

    def apply_exploration(self, loss_bT: Tensor, log_ratio_bT: Tensor) -> Tensor:
        exploration, chosen_BT = self.update.objective.exploration, self.update.targets.chosen_BT
        if exploration is None or chosen_BT is None:
            return loss_bT
        return exploration.treat(loss_bT, log_ratio_bT, self.slice_rows(chosen_BT))

    def divergence(self, reference_BT: Tensor) -> Tensor:
        config = self.update.algorithm.kl
        return kl_loss(
            self.current.logprobs_BT,
            self.slice_rows(reference_BT),
            self.trained_bT,
            kind=config.loss_estimator,
            straight_through=config.straight_through,
        )


def _zero_gradient(part: Part, current: PolicyOutput) -> Tensor:
    """The loss of an empty micro-batch: its backward pass, a collective like any other, has a gradient of zero."""
    columns = {"policy": current[:2], "critic": current[2:], "both": current}[part]
    first, *others = (column.sum() * 0.0 for column in columns)
    return sum(others, start=first)
