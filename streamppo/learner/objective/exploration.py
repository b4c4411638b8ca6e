"""Builds the configured exploration of tokens. B trajectories of a batch, T completion tokens (padded)."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

from torch import Tensor

from streamppo.algorithms import exploration
from streamppo.config import regularisation as choices
from streamppo.learner.batch.padded import PaddedBatch, row_order
from streamppo.learner.model.policy import PolicyOutput

Choose: TypeAlias = Callable[[PaddedBatch, PolicyOutput, Tensor, Tensor], Tensor]
"""(batch, proximal scores, advantages_BT, trained_BT) -> [B, T] bool."""
Treat: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(loss_BT, log(current / proximal)_BT, chosen_BT) -> losses [B, T]."""


class Exploration(NamedTuple):
    """`choose` selects tokens, once per batch; `treat` changes the policy loss of the selected tokens."""

    choose: Choose
    treat: Treat


def build(choice: choices.Exploration, seed: int) -> Exploration | None:
    """Build the functions of `choice`; None without exploration. `seed` is the run's seed."""
    match choice:
        case choices.NoExploration():
            return None
        case choices.TopEntropy():
            return Exploration(partial(_top_entropy, choice), exploration.keep_tokens)
        case choices.ClipCov():
            return Exploration(partial(_clip_cov, choice, seed), exploration.drop_tokens)
        case choices.KlCov(coefficient=coefficient):
            return Exploration(partial(_kl_cov, choice), partial(exploration.penalise_tokens, coefficient=coefficient))


def _top_entropy(
    choice: choices.TopEntropy, batch: PaddedBatch, proximal: PolicyOutput, advantages_BT: Tensor, trained_BT: Tensor
) -> Tensor:
    return exploration.high_entropy_mask(proximal.entropy_BT, trained_BT, share=choice.share)


def _clip_cov(
    choice: choices.ClipCov,
    seed: int,
    batch: PaddedBatch,
    proximal: PolicyOutput,
    advantages_BT: Tensor,
    trained_BT: Tensor,
) -> Tensor:
    covariance_BT = exploration.covariance(proximal.logprobs_BT, advantages_BT, trained_BT)
    # Epochs are numbered from 0, so -1 makes the draw independent of every epoch's row order.
    order = partial(row_order, seed=seed, version=batch.version, epoch=-1)
    return exploration.clip_cov(covariance_BT, trained_BT, share=choice.share, band=choice.band, order=order)


def _kl_cov(
    choice: choices.KlCov, batch: PaddedBatch, proximal: PolicyOutput, advantages_BT: Tensor, trained_BT: Tensor
) -> Tensor:
    covariance_BT = exploration.covariance(proximal.logprobs_BT, advantages_BT, trained_BT)
    return exploration.kl_cov(covariance_BT, trained_BT, share=choice.share)
