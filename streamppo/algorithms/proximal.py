"""Proximal log-probs without a separate forward pass.

B sequences, T response tokens (padded).
"""

from torch import Tensor

from streamppo.algorithms.masked import check_tokens, fill


def single_step(behavior_logprobs_BT: Tensor, logprobs_BT: Tensor, lag_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: in an update of one step the proximal policy is the current one, detached."""
    check_tokens(mask_BT, behavior_logprobs_BT=behavior_logprobs_BT, logprobs_BT=logprobs_BT, lag_BT=lag_BT)
    return fill(logprobs_BT.detach(), mask_BT)


def loglinear(behavior_logprobs_BT: Tensor, logprobs_BT: Tensor, lag_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: interpolate the proximal policy between behavior and current; it is one version before current.

        weight_t   = 1 / (lag_t + 1)
        proximal_t = weight_t * behavior_logprobs_t + (1 - weight_t) * logprobs_t        (detached)

    A-3PO, https://arxiv.org/abs/2512.06547: the weight of behavior is 1 / d with d = lag + 1, the number of versions
    from the token's to the one being made. At lag 0 the behavior policy is the proximal one; for large lag the result
    approaches the current policy and the ratio 1.
    """
    check_tokens(mask_BT, behavior_logprobs_BT=behavior_logprobs_BT, logprobs_BT=logprobs_BT, lag_BT=lag_BT)
    behavior_BT, current_BT = fill(behavior_logprobs_BT.detach(), mask_BT), fill(logprobs_BT.detach(), mask_BT)
    weight_BT = 1 / (fill(lag_BT, mask_BT).clamp(min=0).to(current_BT.dtype) + 1)
    return weight_BT * behavior_BT + (1 - weight_BT) * current_BT


def behavior(behavior_logprobs_BT: Tensor, logprobs_BT: Tensor, lag_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T]: the behavior policy as anchor, so that one ratio covers both lag and the update's movement.

        ratio_t = exp(logprobs_t - behavior_logprobs_t)

    Plain PPO, https://arxiv.org/abs/1707.06347; DPPO's anchor, https://arxiv.org/abs/2602.04879.
    At lag 0 and with an exact engine this is the learner's policy before the first step.
    """
    check_tokens(mask_BT, behavior_logprobs_BT=behavior_logprobs_BT, logprobs_BT=logprobs_BT, lag_BT=lag_BT)
    return fill(behavior_logprobs_BT.detach(), mask_BT)
