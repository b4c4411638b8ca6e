"""The metrics of one update. B trajectories, b rows of a micro-batch, T completion tokens (padded)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.algorithms.advantages import AdvantageEstimate
from streamppo.algorithms.diagnostics import OffPolicy, off_policy, ratio_quantiles, update_statistics_of
from streamppo.algorithms.groups import zero_variance
from streamppo.algorithms.kl import kl, policy_weights
from streamppo.algorithms.value_losses import explained_variance
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.device import add_up, to_device
from streamppo.learner.model.policy import Part, PolicyOutput
from streamppo.learner.objective.build_correction import TRUNCATED
from streamppo.learner.objective.targets import Targets


class Sums(NamedTuple):
    """Shares of losses and sums over tokens, detached, in float64: they add up over micro-batches and ranks.

    `losses_2` are the loss shares of policy and critic. The other sums weight all trained tokens equally: `tokens_5`
    are the sums of `update_sums`. `values_2` counts the critic's tokens and its tokens with a clipped value.
    """

    losses_2: Tensor
    tokens_5: Tensor
    entropy: Tensor
    values_2: Tensor

    @staticmethod
    def zero(device: torch.device) -> "Sums":
        return Sums(*(torch.zeros(size, dtype=torch.float64, device=device) for size in (2, 5, 1, 2)))

    @staticmethod
    def of_policy(loss: Tensor, tokens_5: Tensor, entropy: Tensor) -> "Sums":
        zero = Sums.zero(loss.device)
        return zero._replace(losses_2=_float64(loss, 0), tokens_5=tokens_5, entropy=_float64(entropy))

    @staticmethod
    def of_critic(loss: Tensor, trained: Tensor, clipped: Tensor) -> "Sums":
        return Sums.zero(loss.device)._replace(losses_2=_float64(0, loss), values_2=_float64(trained, clipped))

    def plus(self, other: "Sums") -> "Sums":
        return Sums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class PolicyPass(NamedTuple):
    """A pass of the policy over the rows of a micro-batch: log-probs, and ratios to the proximal policy, in float32.

    `kept` is the number of tokens with a weight in the loss. `left_out` [b, T] are the tokens that each rule leaves
    out, by its metric.
    """

    rows: Tensor
    logprobs_bT: Tensor
    ratio_bT: Tensor
    kept: Tensor
    left_out: Mapping[str, Tensor]


class Minibatch(NamedTuple):
    """The result of a minibatch; `sums` and `passes` are this rank's part.

    `rows`, on the CPU, are the passed rows of all ranks; `idle` rows were not passed. `grad_norm` is None if no step
    was due, and not finite if the step was skipped. `stopped_early`: the policy had moved too far, so it makes no
    further step. `is_empty`: no token was left in the loss, so no step was made.
    """

    part: Part
    rows: Tensor
    sums: Sums
    passes: Sequence[PolicyPass]
    grad_norm: float | None
    stopped_early: bool
    is_empty: bool = False
    idle: Tensor | None = None


def first_logprobs(
    minibatches: Iterable[Minibatch], like_BT: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """[B, T] log-probs from every row's first pass, and [B], True for rows with a pass. A collective."""
    first_BT = torch.zeros(like_BT.shape, device=like_BT.device)
    passed_B = torch.zeros(len(like_BT), dtype=torch.bool, device=like_BT.device)
    for minibatch in _with_policy(minibatches):
        for rows, logprobs_bT, *_ in minibatch.passes:
            new_b = ~passed_B[rows]
            first_BT[rows[new_b], : logprobs_bT.shape[1]] = logprobs_bT[new_b]
        passed_B[minibatch.rows.to(passed_B.device)] = True
    add_up(first_BT, group)
    return first_BT, passed_B


def step_metrics(minibatches: Sequence[Minibatch], trained_BT: Tensor, group: dist.ProcessGroup) -> dict[str, float]:
    """The metrics of steps; losses are means over all minibatches, with or without a step. A collective.

    Entropy and ratios are left out if the policy passed over no trained token.
    """
    total = Sums.zero(trained_BT.device)
    for minibatch in minibatches:
        total = total.plus(minibatch.sums)
    for column in total:
        add_up(column, group)
    policy_loss, value_loss = total.losses_2.tolist()
    trained, clipped = total.values_2.tolist()
    statistics = update_statistics_of(total.tokens_5)
    quantiles = ratio_quantiles(*_last_ratios(minibatches, trained_BT, group))
    policy, critic = (_norms(minibatches, of_critic=of_critic) for of_critic in (False, True))
    critic_metrics = (
        {"critic_steps": float(len(critic)), "critic_grad_norm": sum(critic) / len(critic)} if critic else {}
    )
    of_tokens: dict[str, float] = {
        "entropy": total.entropy.item() / max(1.0, statistics.tokens),
        **dict(zip(("ratio_p01", "ratio_p50", "ratio_p99"), quantiles, strict=True)),
    }
    return {
        "policy_loss": policy_loss / max(1, sum(minibatch.part != "critic" for minibatch in minibatches)),
        "value_loss": value_loss / max(1, sum(minibatch.part != "policy" for minibatch in minibatches)),
        "value_clip_fraction": clipped / max(1.0, trained),
        "proximal_kl_k1": statistics.k1,
        "proximal_kl": statistics.k3,
        "clip_fraction_high": statistics.clip_fraction_high,
        "clip_fraction_low": statistics.clip_fraction_low,
        "grad_norm": sum(policy) / max(1, len(policy)),
        "steps": float(len(policy)),
        "bad_steps": float(sum(_is_bad(minibatch) for minibatch in minibatches)),
        "empty_steps": float(sum(minibatch.is_empty for minibatch in minibatches)),
        "stopped_early": float(any(minibatch.stopped_early for minibatch in minibatches)),
        **critic_metrics,
        **(of_tokens if statistics.tokens else {}),
    }


def _last_ratios(
    minibatches: Iterable[Minibatch], trained_BT: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """[B, T] ratios from every row's last pass, and [B, T], True for trained tokens of rows with a pass."""
    ratio_BT = torch.zeros(trained_BT.shape, device=trained_BT.device)
    passed_B = torch.zeros(len(trained_BT), dtype=torch.bool, device=trained_BT.device)
    for minibatch in _with_policy(minibatches):
        minibatch_rows = minibatch.rows.to(passed_B.device)
        passed_B[minibatch_rows], ratio_BT[minibatch_rows] = True, 0.0
        for rows, _, ratio_bT, *_ in minibatch.passes:
            ratio_BT[rows, : ratio_bT.shape[1]] = ratio_bT
    add_up(ratio_BT, group)
    return ratio_BT, trained_BT & passed_B[:, None]


def _with_policy(minibatches: Iterable[Minibatch]) -> Iterable[Minibatch]:
    return (minibatch for minibatch in minibatches if minibatch.part != "critic")


def _norms(minibatches: Iterable[Minibatch], *, of_critic: bool) -> list[float]:
    steps = (minibatch for minibatch in minibatches if (minibatch.part == "critic") is of_critic)
    return [step.grad_norm for step in steps if step.grad_norm is not None and not _is_bad(step)]


def _is_bad(minibatch: Minibatch) -> bool:
    return minibatch.grad_norm is not None and not math.isfinite(minibatch.grad_norm)


def _float64(*numbers: Tensor | float) -> Tensor:
    """Join numbers, at least one of them a tensor, to one detached vector on the device of the first tensor."""
    device = next(number.device for number in numbers if isinstance(number, Tensor))
    # `torch.full` runs on the device; `torch.tensor(number)` would copy from the host and wait for the GPU.
    tensors = (scalar if isinstance(scalar, Tensor) else torch.full((), scalar, device=device) for scalar in numbers)
    return torch.stack([scalar.detach().double() for scalar in tensors])


def batch_metrics(
    batch: PaddedBatch,
    learner: PolicyOutput,
    passed_B: Tensor,
    estimate: AdvantageEstimate,
    trained_BT: Tensor,
    divergences: OffPolicy | None = None,
) -> dict[str, float]:
    """The metrics of the batch before its first step; importance weights are not truncated.

    `learner` are the proximal policy's scores of the rows `passed_B`, or the scores of each row's first pass.
    `divergences`, of the proximal from the behavior policy, are computed if they are None.
    """
    mask_BT = batch.mask_BT
    compared_BT = mask_BT & passed_B[:, None]
    if divergences is None:
        divergences = off_policy(learner.logprobs_BT, batch.behavior_logprobs_BT, compared_BT, batch.lag_BT)
    by_lag = {}
    for bucket, divergence in divergences.by_lag.items():
        by_lag |= {f"ess_lag_{bucket}": divergence.ess_token, f"behavior_kl_lag_{bucket}": divergence.k3}
    mismatch = {} if divergences.numerics is None else {"mismatch": divergences.numerics.mean_abs_log_ratio}
    return {
        **describe(batch, trained_BT),
        "behavior_kl_k1": divergences.overall.k1,
        "behavior_kl": divergences.overall.k3,
        "ess": divergences.overall.ess_token,
        "ess_sequence": divergences.overall.ess_sequence,
        "chi2": divergences.overall.chi2_token,
        "chi2_sequence": divergences.overall.chi2_sequence,
        "weights_high": divergences.overall.fraction_high,
        "weights_low": divergences.overall.fraction_low,
        "log_ppl_engine": divergences.overall.log_ppl_engine,
        "log_ppl_learner": divergences.overall.log_ppl_learner,
        "explained_variance": float(explained_variance(learner.values_BT, estimate.returns, mask_BT)),
        **mismatch,
        **by_lag,
    }


def describe(batch: PaddedBatch, trained_BT: Tensor) -> dict[str, float]:
    """The metrics of a batch that need no policy; `trained_BT` is True for its tokens in the loss."""
    lag = batch.lag_BT[batch.mask_BT].float()
    return {
        **_completion_metrics(batch),
        "tokens": float(batch.mask_BT.sum()),
        "tokens_too_old": float((batch.mask_BT & ~batch.fresh_BT).sum()),
        "tokens_trained": float(trained_BT.sum()),
        "equal_groups": zero_variance(batch.reward_B, batch.prompt_B).float().mean().item(),
        "lag_mean": lag.mean().item(),
        "lag_max": lag.max().item(),
        **_candidates(batch),
        **{f"reward_{name}": value_B.nanmean().item() for name, value_B in batch.components_B.items()},
    }


def _completion_metrics(batch: PaddedBatch) -> dict[str, float]:
    """The metrics of completions that have ended, each counted with its last segment; left out if none has ended."""
    ended_B = ~batch.cut_B
    metrics = {"segments_cut": batch.cut_B.float().mean().item()} if batch.cut_B.any() or batch.prefix_B.any() else {}
    if not ended_B.any():
        return metrics
    length_B = batch.prefix_B + batch.mask_BT.sum(-1)
    means = {"reward": batch.reward_B, "length": length_B.float(), "truncated": batch.truncated_B.float()}
    return metrics | {name: column_B[ended_B].mean().item() for name, column_B in means.items()}


def _candidates(batch: PaddedBatch) -> dict[str, float]:
    if batch.candidates is None:
        return {}
    count_BT = batch.candidates.counts
    cut_N = count_BT[batch.mask_BT & (count_BT > 0)].float()
    forced, sampled = int((cut_N == 1).sum()), int(batch.mask_BT.sum())
    return {"candidates": cut_N.mean().item() if len(cut_N) else 0.0, "forced": forced / sampled}


def distances(batch: PaddedBatch, targets: Targets, learner: PolicyOutput, passed_B: Tensor) -> dict[str, float]:
    """KL to the reference per response, KL to the teacher per token, NLL of right answers; see `batch_metrics`."""
    metrics: dict[str, float] = {}
    mask_BT = batch.mask_BT & passed_B[:, None]

    def summed_kl(frozen_BT: Tensor) -> Tensor:
        # An older policy, or the engine's kernels, gave the behavior's log-probs: importance weights correct for both.
        weights_BT = policy_weights(learner.logprobs_BT, batch.behavior_logprobs_BT, mask_BT)
        return (kl(learner.logprobs_BT, frozen_BT, mask_BT, kind="k3") * weights_BT).sum()

    if targets.reference_BT is not None:
        metrics["reference_kl"] = (summed_kl(targets.reference_BT) / passed_B.sum()).item()
    if targets.teacher_BT is not None:
        metrics["teacher_kl"] = summed_kl(targets.teacher_BT).item() / max(1, int(mask_BT.sum()))
    if targets.right_BT is not None:
        right_BT = targets.right_BT & mask_BT
        metrics["positive_nll"] = -learner.logprobs_BT[right_BT].sum().item() / max(1, int(right_BT.sum()))
    return metrics


def dropped_shares(
    names_N: Sequence[str], minibatches: Sequence[Minibatch], batch: PaddedBatch, group: dist.ProcessGroup
) -> dict[str, float]:
    """The share of sampled tokens that each rule leaves out, and (`NAME_responses`) of responses that lose a token.

    Shares are over all passes of the policy's loss; for truncated completions also over the idle rows. Without tokens a
    share is 0. A token may count for several rules. A collective if there is a rule.
    """
    if not names_N:
        return {}
    counts_NC = torch.zeros(len(names_N) + 1, 2, dtype=torch.float64, device=batch.mask_BT.device)
    for policy_pass in (policy_pass for minibatch in minibatches for policy_pass in minibatch.passes):
        counts_NC[0] += _counts(batch.mask_BT[policy_pass.rows])
        for place, name in enumerate(names_N, start=1):
            counts_NC[place] += _counts(policy_pass.left_out[name])
    add_up(counts_NC, group)
    shares: dict[str, float] = {}
    for name, dropped_C in zip(names_N, counts_NC[1:], strict=True):
        idle_dropped_C, idle_C = _idle_counts(minibatches, batch) if name == TRUNCATED else (0.0, 0.0)
        share_C = (dropped_C + idle_dropped_C) / (counts_NC[0] + idle_C).clamp(min=1.0)
        shares[name], shares[f"{name}_responses"] = share_C.tolist()
    return shares


def _counts(mask_bT: Tensor) -> Tensor:
    return torch.stack([mask_bT.sum(), mask_bT.any(-1).sum()])


def _idle_counts(minibatches: Iterable[Minibatch], batch: PaddedBatch) -> tuple[Tensor, Tensor]:
    idle = [minibatch.idle for minibatch in minibatches if minibatch.part != "critic" and minibatch.idle is not None]
    rows = to_device(torch.cat([torch.empty(0, dtype=torch.long), *idle]), batch.mask_BT.device)
    mask_bT = batch.mask_BT[rows]
    return _counts(mask_bT & batch.truncated_B[rows][:, None]), _counts(mask_bT)
