"""A loss that takes, once per process, longer than the heartbeat timeout of its test."""

import itertools
import time

from torch import Tensor

from streamppo.algorithms.custom_functions import LossInputs

SLOW_CALL = 4
SLOW_S = 20.0
_calls = itertools.count(1)


def loss(inputs: LossInputs) -> Tensor:
    if next(_calls) == SLOW_CALL:
        time.sleep(SLOW_S)
    return -inputs.advantages_BT * inputs.ratio_BT
