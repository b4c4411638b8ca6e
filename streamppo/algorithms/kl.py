"""KL divergence estimated from sampled tokens: a penalty in the reward, a term of the loss, an alarm.

B sequences, T response tokens (padded), N response tokens (packed). All are estimates of KL(current ||
reference) for tokens that the current policy sampled.
"""

from typing import Literal

from torch import Tensor

from streamppo.algorithms.layout import check, fill

Estimator = Literal["k1", "k2", "k3"]
LOG_RATIO_BOUND = 20.0


def kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: Estimator,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Three estimates of the same divergence from one token, with d = logprobs - reference_logprobs.

        k1 = d          unbiased, and negative half of the time
        k2 = d^2 / 2    biased but small; its GRADIENT is the unbiased one
        k3 = exp(-d) - 1 + d    unbiased and never negative

    Schulman 2020, http://joschu.net/blog/kl-approx.html. d is clamped to +-20. All are 0 for equal policies.
    """
    check(mask, cu_seqlens, logprobs=logprobs, reference_logprobs=reference_logprobs)
    difference = fill(logprobs, mask) - fill(reference_logprobs.detach(), mask)
    difference = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        return (-difference).expm1() + difference
    raise ValueError(f"unknown KL estimator {kind!r}: k1, k2 or k3")


def kl_reward(
    rewards: Tensor,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    beta: float,
    kind: Estimator = "k1",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The penalty as part of the reward: rewards - beta * KL at every token, detached.

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593. With k1 the sum over a response is
    score - beta * log(current / reference) of the whole response.
    """
    check(mask, cu_seqlens, rewards=rewards)
    penalty = kl(logprobs.detach(), reference_logprobs, mask, kind=kind, cu_seqlens=cu_seqlens)
    return fill(rewards, mask) - beta * penalty


def kl_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: Estimator = "k3",
    straight_through: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The penalty as a term of the loss, per token; differentiable; aggregate it like the policy loss.

    GRPO's is k3 (https://arxiv.org/abs/2402.03300). An unbiased VALUE is not an unbiased GRADIENT: that of k1
    is zero on average and that of k3 belongs to the reverse KL, while k2's is right on policy
    (https://arxiv.org/abs/2510.01555). straight_through keeps the value of `kind` and takes the gradient of
    k2.
    """
    value = kl(logprobs, reference_logprobs, mask, kind=kind, cu_seqlens=cu_seqlens)
    if not straight_through:
        return value
    gradient = kl(logprobs, reference_logprobs, mask, kind="k2", cu_seqlens=cu_seqlens)
    return value.detach() + gradient - gradient.detach()


def next_beta(beta: float, observed_kl: float, num_trajectories: int, *, target: float, horizon: int) -> float:
    """A proportional controller steers beta towards the target KL; observed_kl is per response.

        error = clamp(observed_kl / target - 1, -0.2, 0.2);   beta <- beta * (1 + error * num_trajectories /
        horizon)

    Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593. At observed_kl == target beta stands
    still.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"target and horizon must be positive, got {target} and {horizon}")
    error = min(max(observed_kl / target - 1, -0.2), 0.2)
    return beta * max(0.0, 1 + error * num_trajectories / horizon)


def stop_early(approximate_kl: float, target_kl: float | None, *, slack: float = 1.5) -> bool:
    """True when the rest of the update should be skipped: KL(proximal || current) > slack * target_kl.

    The rule of Spinning Up and Stable-Baselines3
    (https://spinningup.openai.com/en/latest/algorithms/ppo.html). Without a target the answer is always
    False; a NaN stops.
    """
    return target_kl is not None and not approximate_kl <= slack * target_kl
