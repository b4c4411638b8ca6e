"""A policy loss of your own: PPO's clip, with a quadratic penalty in place of the flat part.

    streamppo run configs/math.toml learner.minibatches=4 \
        algorithm.policy_loss.kind=function algorithm.policy_loss.function=examples/custom_loss.py:loss

A run calls `loss` once for every micro-batch. It gets a `LossInputs`: [B, T] tensors of the current, the proximal
and the behavior log-probs, the ratio of the first two, the advantages and the mask. It returns [B, T] losses, one for
each token; aggregation, importance weights, entropy and KL are added by the trainer as for every other loss.
"""

from torch import Tensor

from streamppo.algorithms.custom_loss import LossInputs

RANGE = 0.2
"""The ratio moves this far without a penalty."""
PENALTY = 5.0
"""Weight of the squared rest."""


def loss(inputs: LossInputs) -> Tensor:
    """-advantage * ratio + PENALTY * max(0, |ratio - 1| - RANGE)^2, [B, T]."""
    beyond_BT = ((inputs.ratio_BT - 1).abs() - RANGE).clamp(min=0)
    return -inputs.advantages_BT * inputs.ratio_BT + PENALTY * beyond_BT**2
