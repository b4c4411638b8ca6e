"""Rules that leave tokens or responses out of the policy's loss.

    rejection    drops tokens by proximal / behavior, as part of a correction: their weight is 0
    filter       leaves out a whole response: a truncated one, or a negative one that is far off-policy

B sequences, T response tokens (padded), N rules. w_bt = proximal / behavior of a token. A token that is left out still
counts in the denominators (`aggregate`), and its reward in the mean of its group. Every rule keeps a token with a NaN
ratio, so that NaN leads to a bad step instead of a silently dropped token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from streamppo.algorithms.corrections import Correction, Level, in_band, log_weights
from streamppo.algorithms.masked import bounded_exp, check_sequences, check_tokens, sequence_mean, spread


class RejectionRule(NamedTuple):
    """`keeps` maps (proximal, behavior, mask), [B, T] each, to [B, T] bool; `name` is the rule's name in metrics."""

    name: str
    keeps: Callable[[Tensor, Tensor, Tensor], Tensor]


def reject(
    correction: Correction,
    proximal_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    mask_BT: Tensor,
    rules_N: Sequence[RejectionRule],
) -> Correction:
    """Drop the tokens that at least one rule rejects; the other tokens keep their weights.

        weights_bt = weights_bt if every rule keeps bt else 0

    With weights of 1 and one rule this is verl's rollout_rs without rollout_is, or SkyRL's sequence masks. With
    truncated weights and a rule for responses it is MIS, Liu, Li et al. 2025, https://richardli.xyz/rl-collapse.
    """
    keep_BT, dropped = correction.keep, dict(correction.dropped)
    for name, keeps in rules_N:
        kept_BT = keeps(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT)
        keep_BT, dropped[name] = keep_BT & kept_BT, mask_BT & ~kept_BT
    return Correction(correction.weights.masked_fill(~keep_BT, 0.0), keep_BT, dropped)


def ratio_in_band(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, level: Level, lo: float, hi: float
) -> Tensor:
    """[B, T] bool: lo <= ratio <= hi, for the ratio of a token or of its response (`corrections.log_weights`).

    "token" is IcePop's mask, if the weight is the ratio itself. The ratio of a "sequence" is a product, which grows
    with length; in the "geometric" mean, deviations of opposite signs cancel.
    """
    return in_band(log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level=level), lo, hi)


def outlier_free(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, lo: float, hi: float
) -> Tensor:
    """[B, T] bool: lo <= w_bt <= hi for every unmasked token of the response.

    Trust region masking by the maximum, https://arxiv.org/abs/2512.23075, and SkyRL's outlier tokens. With [1 / c, c]
    this bounds max_t(abs(log(w_bt))) by log(c).
    """
    inside_BT = ratio_in_band(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="token", lo=lo, hi=hi)
    return (inside_BT | ~mask_BT).all(-1, keepdim=True).expand(mask_BT.shape)


def mean_k3(proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, at_most: float) -> Tensor:
    """[B, T] bool: mean_t(w_bt - 1 - log(w_bt)) <= at_most over the unmasked tokens of the response.

    The mean is the k3 estimate of KL(behavior || proximal), http://joschu.net/blog/kl-approx.html, whose terms are
    never negative and so do not cancel. Trust region masking by the mean, https://arxiv.org/abs/2512.23075.
    """
    log_w_BT = log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="token")
    k3_B = sequence_mean(bounded_exp(log_w_BT) - 1 - log_w_BT, mask_BT)
    return ~(spread(k3_B, mask_BT) > at_most)


def truncated_tokens(truncated_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] bool, True at the unmasked tokens of truncated completions, because their reward is noise.

    Overlong filtering, section 3.4 of DAPO, https://arxiv.org/abs/2503.14476.
    """
    check_tokens(mask_BT)
    check_sequences(mask_BT, truncated_B=truncated_B)
    return mask_BT & truncated_B[:, None]


def off_policy_negative(
    logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, delta: float
) -> Tensor:
    """[B, T] bool, True at responses with a negative advantage that are unlikely under the current policy.

        left_out_bt = mean_t(advantages_bt) < 0 and mean_t(behavior_logprobs_bt - logprobs_bt) > delta

    Off-policy sequence masking, DeepSeek-V3.2, https://arxiv.org/abs/2512.02556. The difference of log-probs contains
    lag, numerical error and the steps of this update. In the paper a response has one advantage. Both means are over
    unmasked tokens.
    """
    check_tokens(mask_BT, advantages_BT=advantages_BT)
    drift_B = -sequence_mean(log_weights(logprobs_BT, behavior_logprobs_BT, mask_BT, level="token"), mask_BT)
    left_out_B = (sequence_mean(advantages_BT, mask_BT) < 0) & (drift_B > delta)
    return mask_BT & left_out_B[:, None]
