"""The numbers of one update.

B trajectories, b rows of a micro-batch, T completion tokens (padded).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.algorithms.advantages import Estimate
from streamppo.algorithms.diagnostics import off_policy, ratio_quantiles, update_statistics_of, update_sums
from streamppo.algorithms.groups import zero_variance
from streamppo.algorithms.policy_losses import TokenLoss
from streamppo.algorithms.value_losses import explained_variance
from streamppo.learner.batch import Packed
from streamppo.learner.policy import Part, Scored

LOSSES = ("policy_loss", "entropy", "value_loss", "value_clip_fraction")
VALUE_LOSSES = 2
"""So many of them, at the end, are the critic's."""


class Sums:
    """Running sums over the micro-batches of one update; `means` and `first_logprobs` add them over ranks.

    Every minibatch begins on all ranks alike; of its rows, each rank adds what it was dealt, in every epoch anew.
    """

    def __init__(self, mask_BT: Tensor, group: dist.ProcessGroup) -> None:
        self.update = torch.zeros(6, dtype=torch.float64, device=mask_BT.device)
        self.stopped_early = 0
        self.bad_steps = 0
        self._group = group
        self._losses = torch.zeros(len(LOSSES), dtype=torch.float64, device=mask_BT.device)
        self._ratio_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
        self._seen_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
        self._first_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
        self._passes_B = torch.zeros(len(mask_BT), dtype=torch.long, device=mask_BT.device)
        self._minibatches = {True: 0, False: 0}
        self._norms: dict[bool, list[float]] = {True: [], False: []}

    def begin(self, rows: Tensor, part: Part) -> None:
        """A minibatch. What any rank keeps of the policy's pass over these rows before is replaced."""
        self._minibatches[part == "critic"] += 1
        if part != "critic":
            # Rows are dealt out on the CPU: such indices read a GPU's tensors, and are not read by them.
            rows = rows.to(self._passes_B.device)
            self._passes_B[rows] += 1
            self._ratio_BT[rows] = 0
            self._seen_BT[rows] = 0

    def add_losses(self, losses: dict[str, Tensor]) -> None:
        """One micro-batch: its shares of the losses."""
        zero = self._losses.new_zeros(())
        self._losses += torch.stack([losses.get(name, zero).detach().double() for name in LOSSES])

    def add_tokens(
        self, rows: Tensor, policy: TokenLoss, logprobs_bT: Tensor, proximal_bT: Tensor, mask_bT: Tensor
    ) -> None:
        """One micro-batch of the policy: its token sums, and its log-probs if it is the first with these rows."""
        width_T, logprobs_bT = mask_bT.shape[1], logprobs_bT.detach()
        rows = rows.to(self._passes_B.device)
        self.update += update_sums(logprobs_bT, proximal_bT, mask_bT, policy.clipped)
        self._ratio_BT[rows, :width_T] = policy.ratio.float()
        self._seen_BT[rows, :width_T] = mask_bT.float()
        first_b = self._passes_B[rows] == 1
        self._first_BT[rows[first_b], :width_T] = logprobs_bT[first_b].float()

    def kl_since(self, before: Tensor) -> float:
        """KL(proximal || current), k3 per token, of what was added since `update` was `before`. A collective."""
        sums = self.update - before
        dist.all_reduce(sums, group=self._group)
        return update_statistics_of(sums).k3

    def add_step(self, grad_norm: float, *, critic: bool) -> None:
        """One optimizer step, of the critic alone or not."""
        self._norms[critic].append(grad_norm)

    def first_logprobs(self) -> tuple[Tensor, Tensor]:
        """[B, T] log-probs of every row's first pass, and [B] which rows had one. A collective."""
        dist.all_reduce(self._first_BT, group=self._group)
        return self._first_BT, self._passes_B > 0

    def means(self) -> dict[str, float]:
        """Losses per minibatch, a step taken of it or not, and token sums per token. A collective."""
        for tensor in (self.update, self._losses, self._ratio_BT, self._seen_BT):
            dist.all_reduce(tensor, group=self._group)
        policy, critic = self._norms[False], self._norms[True]
        passes, critic_passes = self._minibatches[False], self._minibatches[True]
        counts = [passes] * (len(LOSSES) - VALUE_LOSSES) + [critic_passes or passes] * VALUE_LOSSES
        own = {"critic_steps": float(len(critic)), "critic_grad_norm": sum(critic) / len(critic)} if critic else {}
        statistics = update_statistics_of(self.update)
        low, median, high = ratio_quantiles(self._ratio_BT, self._seen_BT > 0)
        return {
            **{name: value / n for name, value, n in zip(LOSSES, self._losses.tolist(), counts, strict=True)},
            "proximal_kl_k1": statistics.k1,
            "proximal_kl": statistics.k3,
            "clip_fraction_high": statistics.clip_fraction_high,
            "clip_fraction_low": statistics.clip_fraction_low,
            "ratio_p01": low,
            "ratio_p50": median,
            "ratio_p99": high,
            "grad_norm": sum(policy) / max(1, len(policy)),
            "steps": float(len(policy)),
            "bad_steps": float(self.bad_steps),
            "stopped_early": float(self.stopped_early),
            **own,
        }


def batch_metrics(
    batch: Packed, learner: Scored, passed_B: Tensor, estimate: Estimate, trained_BT: Tensor
) -> dict[str, float]:
    """What the batch was like, before any of it was trained on; importance weights before any truncation.

    `learner` is the proximal policy on the rows `passed_B`, or what came nearest to it: the first pass over each row.
    """
    mask_BT = batch.mask_BT
    lag = batch.lag_BT[mask_BT].float()
    compared_BT = mask_BT & passed_B[:, None]
    found = off_policy(learner.logprobs_BT, batch.behavior_logprobs_BT, compared_BT, batch.lag_BT)
    by_lag = {}
    for bucket, divergence in found.by_lag.items():
        by_lag |= {f"ess_lag_{bucket}": divergence.ess_token, f"behavior_kl_lag_{bucket}": divergence.k3}
    return {
        "reward": batch.reward_B.mean().item(),
        "length": mask_BT.sum(-1).float().mean().item(),
        "truncated": batch.truncated_B.float().mean().item(),
        "tokens": float(mask_BT.sum()),
        "tokens_too_old": float((mask_BT & ~batch.fresh_BT).sum()),
        "tokens_trained": float(trained_BT.sum()),
        "equal_groups": zero_variance(batch.reward_B, batch.prompt_B).float().mean().item(),
        "lag_mean": lag.mean().item(),
        "lag_max": lag.max().item(),
        "behavior_kl_k1": found.overall.k1,
        "behavior_kl": found.overall.k3,
        "ess": found.overall.ess_token,
        "ess_sequence": found.overall.ess_sequence,
        "chi2": found.overall.chi2_token,
        "chi2_sequence": found.overall.chi2_sequence,
        "weights_high": found.overall.fraction_high,
        "weights_low": found.overall.fraction_low,
        "log_ppl_engine": found.overall.log_ppl_engine,
        "log_ppl_learner": found.overall.log_ppl_learner,
        "mismatch": found.numerics.mean_abs_log_ratio if found.numerics else 0.0,
        "explained_variance": float(explained_variance(learner.values_BT, estimate.returns, mask_BT)),
        **by_lag,
        **{f"reward_{name}": mean for name, mean in batch.components.items()},
    }
