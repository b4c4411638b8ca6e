"""The configured exploration of tokens. B trajectories of a batch, T completion tokens (padded)."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from streamppo.algorithms import exploration
from streamppo.config import regularisation as choices
from streamppo.learner.batch.padded import PaddedBatch, row_order
from streamppo.learner.model.policy import PolicyOutput


class Exploration(NamedTuple):
    """The exploration `choice` of a run with `seed`."""

    choice: choices.TopEntropy | choices.ClipCov | choices.KlCov
    seed: int

    def choose(self, batch: PaddedBatch, proximal: PolicyOutput, advantages_BT: Tensor, trained_BT: Tensor) -> Tensor:
        """Select tokens of a batch, [B, T] bool, by the proximal policy's scores."""
        if isinstance(self.choice, choices.TopEntropy):
            return exploration.high_entropy_mask(proximal.entropy_BT, trained_BT, share=self.choice.share)
        covariance_BT = exploration.covariance(proximal.logprobs_BT, advantages_BT, trained_BT)
        if isinstance(self.choice, choices.KlCov):
            return exploration.kl_cov(covariance_BT, trained_BT, share=self.choice.share)
        # Epochs are numbered from 0, so -1 makes the draw independent of every epoch's row order.
        order = partial(row_order, seed=self.seed, version=batch.version, epoch=-1)
        return exploration.clip_cov(
            covariance_BT, trained_BT, share=self.choice.share, band=self.choice.band, order=order
        )

    def treat(self, loss_BT: Tensor, log_ratio_BT: Tensor, chosen_BT: Tensor) -> Tensor:
        """Return the policy losses [B, T] with a change at the chosen tokens, by log(current / proximal)."""
        match self.choice:
            case choices.TopEntropy():
                return exploration.keep_tokens(loss_BT, chosen_BT)
            case choices.ClipCov():
                return exploration.drop_tokens(loss_BT, chosen_BT)
            case choices.KlCov(coefficient=coefficient):
                return exploration.penalise_tokens(loss_BT, log_ratio_BT, chosen_BT, coefficient=coefficient)


def build(choice: choices.Exploration, seed: int) -> Exploration | None:
    """Return the exploration of a run with `seed`; None without exploration."""
    return None if isinstance(choice, choices.NoExploration) else Exploration(choice, seed)
