"""On-policy distillation from a teacher's log-probs of sampled tokens, and a likelihood term on right answers.

B sequences, T response tokens (padded).
"""

from torch import Tensor

from streamppo.algorithms.kl import kl
from streamppo.algorithms.masked import check_tokens, fill


def with_teacher(
    advantages_BT: Tensor,
    logprobs_BT: Tensor,
    teacher_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    weight: float,
    others: float = 1.0,
) -> Tensor:
    """[B, T] advantages, minus the weighted reverse KL to the teacher of each token, with discount 0.

        others * advantages_t - weight * (logprobs_t - teacher_logprobs_t)

    On-policy distillation, https://thinkingmachines.ai/blog/on-policy-distillation/: in expectation over the policy's
    own tokens this is minus the gradient of KL(policy || teacher) for each of them. Detached; the difference is clamped
    to +-20. With teacher == policy, or weight 0, only the other advantages are left. Raises ValueError on shapes that
    do not fit.
    """
    check_tokens(mask_BT, advantages_BT=advantages_BT)
    distance_BT = kl(logprobs_BT.detach(), teacher_logprobs_BT, mask_BT, kind="k1")
    return others * fill(advantages_BT, mask_BT) - weight * distance_BT


def positive_nll(logprobs_BT: Tensor, right_BT: Tensor, count: float) -> Tensor:
    """A micro-batch's share of the mean negative log-likelihood of the tokens of right answers; differentiable.

        -sum(logprobs_t over right) / count

    VAPO, section 4.3, https://arxiv.org/abs/2504.05118, there with the weight mu = 0.1. `count` is the number of
    tokens of right answers in the whole minibatch; without any the term is 0.
    """
    check_tokens(right_BT, logprobs_BT=logprobs_BT)
    return -fill(logprobs_BT, right_BT).sum() / max(count, 1.0)
