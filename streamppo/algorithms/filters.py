"""Responses that leave the loss. Their rewards stay in their group's mean, and their tokens in the denominators.

B sequences, T response tokens (padded).
"""

from torch import Tensor

from streamppo.algorithms.corrections import log_weights
from streamppo.algorithms.masked import check_sequences, check_tokens, sequence_mean


def truncated(truncated_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] bool, True at the unmasked tokens of completions that were cut off: their reward is noise.

        left_out_bt = truncated_b

    Overlong filtering, section 3.4 of DAPO, https://arxiv.org/abs/2503.14476. Without cut-off completions it is empty.
    """
    check_tokens(mask_BT)
    check_sequences(mask_BT, truncated_B=truncated_B)
    return mask_BT & truncated_B[:, None]


def off_policy_negative(
    logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, delta: float
) -> Tensor:
    """[B, T] bool, True at responses that failed and that the current policy would hardly sample any more.

        left_out_bt = mean_t(advantages_bt) < 0 and mean_t(behavior_logprobs_bt - logprobs_bt) > delta

    Off-policy sequence masking, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556: the engine's own log-probs against
    the current policy's, so that age, numerics and the steps of this update all count. There the advantage is the
    response's; the mean is the same for it, and one decision for a response whose tokens differ. Both means are over
    its unmasked tokens. An infinite delta leaves nothing out. Raises ValueError where delta is not positive.
    """
    if not delta > 0:
        raise ValueError(f"delta must be positive, got {delta}")
    check_tokens(mask_BT, advantages_BT=advantages_BT)
    drift_B = -sequence_mean(log_weights(logprobs_BT, behavior_logprobs_BT, mask_BT, level="token"), mask_BT)
    left_out_B = (sequence_mean(advantages_BT, mask_BT) < 0) & (drift_B > delta)
    return mask_BT & left_out_B[:, None]
