"""A custom policy loss: as PPO's, with a quadratic penalty in place of the clip.

    streamppo run configs/math.toml learner.minibatches=4 \
        algorithm.policy_loss.kind=function algorithm.policy_loss.function=examples/custom_loss.py:loss

A run calls `loss` once for every micro-batch. It gets a `LossInputs`: [B, T] tensors of the current, the proximal
and the behavior log-probs, the ratio current / proximal, the advantages and the mask. It returns [B, T] losses, one for
each token; the trainer adds aggregation, importance weights, entropy and KL as for every other loss.
"""

from torch import Tensor

from streamppo.algorithms.custom_functions import LossInputs

RANGE = 0.2
"""The ratio may differ from 1 by this much without a penalty."""
PENALTY = 5.0
"""Weight of the squared excess."""


def loss(inputs: LossInputs) -> Tensor:
    """-advantage * ratio + PENALTY * max(0, |ratio - 1| - RANGE)^2, [B, T]."""
    beyond_BT = ((inputs.ratio_BT - 1).abs() - RANGE).clamp(min=0)
    return -inputs.advantages_BT * inputs.ratio_BT + PENALTY * beyond_BT**2
