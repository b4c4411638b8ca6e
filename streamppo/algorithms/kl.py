"""KL divergence to a reference or teacher, estimated from sampled tokens: in the reward, the loss or the advantages.

B sequences, T response tokens (padded). All functions estimate KL(current || reference) from tokens sampled by the
current policy. If another policy sampled the tokens, multiply the estimates by `policy_weights`.
"""

from typing import Literal

from torch import Tensor

from streamppo.algorithms.masked import LOG_RATIO_BOUND, bounded_exp, check_tokens, fill

Estimator = Literal["k1", "k2", "k3"]

K3_BOUND = 10.0
"""The largest k3 of a token in a loss or reward; its gradient is zero where k3 is larger (d < -2.55 or d > 11)."""
TARGET_KL_SLACK = 1.5
"""An update ends when its KL exceeds the target times this number, because KLs of single minibatches scatter."""


def kl(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor, *, kind: Estimator) -> Tensor:
    """[B, T]: one of three estimates of the divergence, each from a single token.

        d  = logprobs - reference_logprobs
        k1 = d                     unbiased, and negative for half of the tokens
        k2 = 0.5 * d^2             biased but small; its GRADIENT is the unbiased one
        k3 = exp(-d) - 1 + d       unbiased and never negative

    Schulman 2020, http://joschu.net/blog/kl-approx.html. d is clamped to +-20.
    """
    check_tokens(mask_BT, logprobs_BT=logprobs_BT, reference_logprobs_BT=reference_logprobs_BT)
    difference_BT = fill(logprobs_BT, mask_BT) - fill(reference_logprobs_BT.detach(), mask_BT)
    difference_BT = difference_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return difference_BT
    if kind == "k2":
        return 0.5 * difference_BT.square()
    return (-difference_BT).expm1() + difference_BT


def policy_weights(logprobs_BT: Tensor, sampled_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T], detached: weights exp(logprobs - sampled_logprobs), which turn a mean over samples into the policy's."""
    check_tokens(mask_BT, logprobs_BT=logprobs_BT, sampled_logprobs_BT=sampled_logprobs_BT)
    log_ratio_BT = fill(logprobs_BT.detach(), mask_BT) - fill(sampled_logprobs_BT.detach(), mask_BT)
    return bounded_exp(log_ratio_BT).masked_fill(~mask_BT, 0.0)


def penalty(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor, *, kind: Estimator) -> Tensor:
    """[B, T]: `kl`, with k3 at most K3_BOUND, as verl's `low_var_kl`: one token must not dominate a gradient."""
    value_BT = kl(logprobs_BT, reference_logprobs_BT, mask_BT, kind=kind)
    return value_BT.clamp(max=K3_BOUND) if kind == "k3" else value_BT


def kl_reward(
    rewards_BT: Tensor,
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    beta: float,
    kind: Estimator = "k1",
) -> Tensor:
    """[B, T]: every token's reward minus the KL penalty, detached.

        rewards_t - beta * kl_t

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593. With k1 the sum over a response is the score minus
    beta * log(current / reference) of the whole response.
    """
    check_tokens(mask_BT, rewards_BT=rewards_BT)
    penalty_BT = penalty(logprobs_BT.detach(), reference_logprobs_BT, mask_BT, kind=kind)
    return fill(rewards_BT, mask_BT) - beta * penalty_BT


def kl_loss(
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    kind: Estimator = "k3",
    straight_through: bool = False,
) -> Tensor:
    """[B, T]: the KL penalty as a differentiable term of the loss; aggregate it like the policy loss.

        kl_t(kind)                                         plain
        stop(kl_t(kind)) + kl_t(k2) - stop(kl_t(k2))       straight_through

    GRPO uses plain k3 (https://arxiv.org/abs/2402.03300). An unbiased VALUE is not an unbiased GRADIENT
    (https://arxiv.org/abs/2510.01555): on policy, the mean gradient of k1 is zero, that of k3 is the gradient of
    KL(reference || current), and only that of k2 is the gradient of KL(current || reference). straight_through has the
    value of `kind` and the gradient of k2. The value of k3 is at most K3_BOUND.
    """
    value_BT = penalty(logprobs_BT, reference_logprobs_BT, mask_BT, kind=kind)
    if not straight_through:
        return value_BT
    gradient_BT = kl(logprobs_BT, reference_logprobs_BT, mask_BT, kind="k2")
    return value_BT.detach() + gradient_BT - gradient_BT.detach()


def kl_advantages(
    advantages_BT: Tensor,
    logprobs_BT: Tensor,
    teacher_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    weight: float,
    others: float = 1.0,
) -> Tensor:
    """[B, T]: the advantages minus the weighted reverse KL to the teacher at each token, with discount 0; detached.

        others * advantages_t - weight * (logprobs_t - teacher_logprobs_t)

    On-policy distillation, https://thinkingmachines.ai/blog/on-policy-distillation/: in expectation over the policy's
    tokens, the KL term's policy gradient is minus the gradient of KL(policy || teacher) at each token. The difference
    is clamped to +-20.
    """
    check_tokens(mask_BT, advantages_BT=advantages_BT)
    distance_BT = kl(logprobs_BT.detach(), teacher_logprobs_BT, mask_BT, kind="k1")
    return others * fill(advantages_BT, mask_BT) - weight * distance_BT


def next_beta(beta: float, observed_kl: float, num_trajectories: int, *, target: float, horizon: int) -> float:
    """Move beta towards the target KL by a proportional controller; observed_kl is per response.

        error = clamp(observed_kl / target - 1, -0.2, 0.2)
        beta  <- beta * max(0, 1 + error * num_trajectories / horizon)

    Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593.
    """
    error = min(max(observed_kl / target - 1, -0.2), 0.2)
    return beta * max(0.0, 1 + error * num_trajectories / horizon)


def stop_early(approximate_kl: float, target_kl: float | None) -> bool:
    """True if the policy has moved so far that the rest of the update is skipped.

        KL(proximal || current) > TARGET_KL_SLACK * target_kl

    The rule of Spinning Up (https://spinningup.openai.com/en/latest/algorithms/ppo.html). Always False without a
    target. NaN gives True.
    """
    return target_kl is not None and not approximate_kl <= TARGET_KL_SLACK * target_kl
