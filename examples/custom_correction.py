"""A custom correction: truncated importance weights that decay with the lag of a token.

    streamppo run configs/math.toml \
        algorithm.correction.kind=function algorithm.correction.function=examples/custom_correction.py:weights

A run calls `weights` once for every batch, on every rank with the same inputs. It gets a `CorrectionInputs`: [B, T]
tensors of the proximal and the behavior log-probs, their ratio, the lag of each token and the masks. It returns [B, T]
weights of at least 0, which multiply the policy loss as constants; a token of weight 0 has no loss.
"""

from torch import Tensor

from streamppo.algorithms.custom_functions import CorrectionInputs

CAP = 2.0
"""The largest weight."""
FADE = 0.9
"""The weight is multiplied by this for each version of lag."""


def weights(inputs: CorrectionInputs) -> Tensor:
    """min(ratio, CAP) * FADE^lag, [B, T]."""
    return inputs.ratio_BT.clamp(max=CAP) * FADE**inputs.lag_BT
