"""PPO's clipped loss with negative advantages at a quarter, as a custom loss: equals `negative_weight = 0.25`."""

import torch
from torch import Tensor

from streamppo.algorithms.custom_functions import LossInputs


def loss(inputs: LossInputs) -> Tensor:
    """The clipped surrogate, a quarter of it where the advantage is negative; [B, T]."""
    bounded_BT = inputs.ratio_BT.clamp(0.8, 1.2)
    loss_BT = torch.maximum(-inputs.advantages_BT * inputs.ratio_BT, -inputs.advantages_BT * bounded_BT)
    return loss_BT * torch.where(inputs.advantages_BT < 0, 0.25, 1.0)
