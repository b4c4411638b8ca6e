"""Filters that remove responses from the loss; their rewards stay in the group's mean, their tokens in denominators.

B sequences, T response tokens (padded).
"""

from torch import Tensor

from streamppo.algorithms.corrections import log_weights
from streamppo.algorithms.masked import check_sequences, check_tokens, sequence_mean


def truncated(truncated_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] bool, True at the unmasked tokens of truncated completions: their reward is noise.

        left_out_bt = truncated_b

    Overlong filtering, section 3.4 of DAPO, https://arxiv.org/abs/2503.14476. Without truncated completions it is all
    False.
    """
    check_tokens(mask_BT)
    check_sequences(mask_BT, truncated_B=truncated_B)
    return mask_BT & truncated_B[:, None]


def off_policy_negative(
    logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, delta: float
) -> Tensor:
    """[B, T] bool, True at responses with a negative advantage that have become unlikely under the current policy.

        left_out_bt = mean_t(advantages_bt) < 0 and mean_t(behavior_logprobs_bt - logprobs_bt) > delta

    Off-policy sequence masking, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556: the engine's log-probs against the
    current policy's, so that lag, numerics and the steps of this update all count. In the paper a response has one
    advantage; the mean equals it, and gives one decision if a response's tokens have different ones. Both means are
    over unmasked tokens. An infinite delta filters nothing. Raises ValueError if delta is not positive.
    """
    if not delta > 0:
        raise ValueError(f"delta must be positive, got {delta}")
    check_tokens(mask_BT, advantages_BT=advantages_BT)
    drift_B = -sequence_mean(log_weights(logprobs_BT, behavior_logprobs_BT, mask_BT, level="token"), mask_BT)
    left_out_B = (sequence_mean(advantages_BT, mask_BT) < 0) & (drift_B > delta)
    return mask_BT & left_out_B[:, None]
