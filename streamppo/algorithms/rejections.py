"""Rules that drop tokens or responses by the distance of proximal from behavior; the weights of the rest stay.

B sequences, T response tokens (padded), N rules. w_bt = proximal / behavior of a token. A rejected token has weight 0
and still counts in the denominators (`aggregate`). Every rule keeps NaN, so that it leads to a bad step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from streamppo.algorithms.corrections import Correction, in_band, log_weights
from streamppo.algorithms.masked import sequence_mean, spread
from streamppo.algorithms.ratios import bounded_exp


class RejectionRule(NamedTuple):
    """`keeps` maps (proximal, behavior, mask), [B, T] each, to [B, T] bool; `name` is used in metrics."""

    name: str
    keeps: Callable[[Tensor, Tensor, Tensor], Tensor]


def rejecting(
    correction: Correction,
    proximal_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    mask_BT: Tensor,
    rules_N: Sequence[RejectionRule],
) -> Correction:
    """Drop the tokens that at least one rule rejects; the weights of the rest stay.

        weights_bt = weights_bt if every rule keeps bt else 0

    Weights of 1 with one rule: verl's rollout_rs without rollout_is, SkyRL's sequence masks. Truncated weights with a
    rule for responses: MIS, Liu, Li et al. 2025, https://richardli.xyz/rl-collapse. Without a rule nothing changes.
    """
    keep_BT, dropped = correction.keep, dict(correction.dropped)
    for name, keeps in rules_N:
        kept_BT = keeps(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT)
        keep_BT, dropped[name] = keep_BT & kept_BT, mask_BT & ~kept_BT
    return Correction(correction.weights.masked_fill(~keep_BT, 0.0), keep_BT, dropped)


def token_in_band(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, lo: float, hi: float
) -> Tensor:
    """[B, T] bool: lo <= w_bt <= hi. With the ratio itself as the weight this is IcePop's mask."""
    return in_band(log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="token"), lo, hi)


def sequence_in_band(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, lo: float, hi: float
) -> Tensor:
    """[B, T] bool: lo <= prod_t(w_bt) <= hi. The product grows with length; on one token it is `token_in_band`."""
    return in_band(log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="sequence"), lo, hi)


def geometric_in_band(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, lo: float, hi: float
) -> Tensor:
    """[B, T] bool: lo <= prod_t(w_bt)^(1 / n_b) <= hi, n_b the unmasked tokens of the response.

    It does not depend on the length of the response. Deviations of opposite signs cancel; `outlier_free` and `mean_k3`
    detect them. With `lo = exp(-delta)`, no `hi` and only negative advantages it is `filters.off_policy_negative`.
    """
    return in_band(log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="geometric"), lo, hi)


def outlier_free(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, lo: float, hi: float
) -> Tensor:
    """[B, T] bool: lo <= w_bt <= hi for every unmasked token of the response.

    With [1 / c, c] this bounds max_t(abs(log(w_bt))) by log(c), with lo = 0 the largest ratio. Trust region masking by
    the maximum, https://arxiv.org/abs/2512.23075; SkyRL's outlier tokens. On one token it is `token_in_band`.
    """
    inside_BT = token_in_band(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, lo=lo, hi=hi)
    return (inside_BT | ~mask_BT).all(-1, keepdim=True).expand(mask_BT.shape)


def mean_k3(proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, at_most: float) -> Tensor:
    """[B, T] bool: mean_t(w_bt - 1 - log(w_bt)) <= at_most over the unmasked tokens of the response.

    The k3 estimate of KL(behavior || proximal), http://joschu.net/blog/kl-approx.html: its terms are never negative and
    do not cancel. Trust region masking by the mean, https://arxiv.org/abs/2512.23075. With proximal == behavior it is 0
    and all is kept. Raises ValueError if the bound is not positive.
    """
    if not at_most > 0:
        raise ValueError(f"at_most must be positive, got {at_most}")
    log_w_BT = log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="token")
    k3_B = sequence_mean(bounded_exp(log_w_BT) - 1 - log_w_BT, mask_BT)
    return ~(spread(k3_B, mask_BT) > at_most)
