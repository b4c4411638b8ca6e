"""The loss of a micro-batch: its share of the loss of a minibatch, so that any split adds up to the same.

B trajectories of the batch, b rows of a micro-batch, T completion tokens (padded).
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from streamppo.algorithms.advantages import Estimate
from streamppo.algorithms.aggregate import Denominators, aggregate
from streamppo.algorithms.corrections import Correction
from streamppo.algorithms.kl import kl_loss
from streamppo.algorithms.value_losses import value_loss
from streamppo.config.sections import Config
from streamppo.learner.batch import Packed
from streamppo.learner.metrics import Sums
from streamppo.learner.objective import Objective
from streamppo.learner.policy import Part, Scored

Cut = Callable[[Tensor], Tensor]
"""[B, T] of the batch -> [b, T] of a micro-batch, as wide as its longest row."""
Average = Callable[[Tensor], Tensor]
"""[b, T] per-token losses -> their share of the minibatch's average."""


class Targets(NamedTuple):
    """What stays fixed while one batch is trained on, all [B, T] on every rank.

    `trained_BT` are the tokens that enter the loss: sampled by the policy, young enough, of a group that teaches.
    Without a `correction`, `scored` has no log-probs either: both are made in passing by `Objective.anchor`.
    """

    scored: Scored
    estimate: Estimate
    correction: Correction | None
    trained_BT: Tensor
    reference_BT: Tensor | None


class Loss:
    """The losses of one update; what they are made of is added to `sums`."""

    def __init__(self, objective: Objective, config: Config, batch: Packed, targets: Targets, sums: Sums) -> None:
        self.objective = objective
        self.config = config
        self.batch = batch
        self.targets = targets
        self.sums = sums

    def of(self, rows: Tensor, part: Part, current: Scored, counts: Denominators) -> Tensor:
        """The share of `rows`, given what the policy says about them; differentiable."""
        if not len(rows):
            # What learns on the other ranks takes part in the collective backward, with a gradient of exactly zero.
            columns = {"policy": current[:2], "critic": current[2:], "both": current}[part]
            return sum(column.sum() * 0.0 for column in columns)  # pyright: ignore[reportReturnType]
        width_T = current.logprobs_BT.shape[1]
        trained_bT, lengths_b = self.targets.trained_BT[rows, :width_T], self.batch.mask_BT[rows].sum(-1)

        def cut(whole_BT: Tensor) -> Tensor:
            return whole_BT[rows, :width_T]

        def average(loss_bT: Tensor) -> Tensor:
            return aggregate(loss_bT, trained_bT, self.config.algorithm.aggregation, counts, lengths_b)

        total = current.logprobs_BT.new_zeros(())
        if part != "critic":
            total = total + self._policy(rows, cut, average, current)
        if part != "policy":
            total = total + self._value(cut, average, current)
        return total

    def _policy(self, rows: Tensor, cut: Cut, average: Average, current: Scored) -> Tensor:
        config, targets, trained_bT = self.config.algorithm, self.targets, cut(self.targets.trained_BT)
        proximal_bT, weights_bT = self._anchored(cut, current)
        policy = self.objective.policy_loss(
            current.logprobs_BT, proximal_bT, cut(targets.estimate.advantages), trained_bT
        )
        losses = {"policy_loss": average(policy.loss * weights_bT), "entropy": average(current.entropy_BT)}
        total = losses["policy_loss"] - config.entropy * losses["entropy"]
        if targets.reference_BT is not None and config.kl.loss_beta:
            divergence_bT = kl_loss(
                current.logprobs_BT,
                cut(targets.reference_BT),
                trained_bT,
                kind=config.kl.loss_estimator,
                straight_through=config.kl.straight_through,
            )
            total = total + config.kl.loss_beta * average(divergence_bT)
        self.sums.add_losses(losses)
        self.sums.add_tokens(rows, policy, current.logprobs_BT, proximal_bT, trained_bT)
        return total

    def _anchored(self, cut: Cut, current: Scored) -> tuple[Tensor, Tensor]:
        """Proximal log-probs and importance weights: known before the first step, or made of the current ones."""
        if self.targets.correction is not None:
            return cut(self.targets.scored.logprobs_BT), cut(self.targets.correction.weights)
        assert self.objective.anchor is not None
        behavior_bT, mask_bT = cut(self.batch.behavior_logprobs_BT), cut(self.batch.mask_BT)
        proximal_bT = self.objective.anchor(behavior_bT, current.logprobs_BT, cut(self.batch.lag_BT), mask_bT)
        return proximal_bT, self.objective.correct(proximal_bT, behavior_bT, mask_bT).weights

    def _value(self, cut: Cut, average: Average, current: Scored) -> Tensor:
        config = self.config.algorithm.critic
        critic = value_loss(
            current.values_BT,
            cut(self.targets.scored.values_BT),
            cut(self.targets.estimate.returns),
            cut(self.targets.trained_BT),
            clip=config.clip or None,
            kind=config.loss,
            huber_delta=config.huber or 1.0,
        )
        losses = {"value_loss": average(critic.loss), "value_clip_fraction": average(critic.clipped.float())}
        self.sums.add_losses(losses)
        return config.coefficient * losses["value_loss"]
