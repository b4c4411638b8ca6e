"""The numbers of one update.

B trajectories, T completion tokens (padded).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.algorithms.advantages import Estimate
from streamppo.algorithms.policy_losses import TokenLoss
from streamppo.learner.model import Scored
from streamppo.learner.packing import Packed


class Sums:
    """Running sums over micro-batches; `means` adds them over ranks and divides by the number of steps or tokens."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps = 0
        self._grad_norm = 0.0

    def add(self, losses: dict[str, Tensor], policy: TokenLoss, log_ratio_bT: Tensor, mask_bT: Tensor) -> None:
        """One micro-batch: its shares of the losses, and its token sums."""
        log_ratio_bT = log_ratio_bT.detach().masked_fill(~mask_bT, 0.0)
        tokens = {
            "clip_fraction": policy.clipped.sum(),
            "proximal_kl": (log_ratio_bT.expm1() - log_ratio_bT).sum(),
            "tokens": mask_bT.sum(),
        }
        for name, value in (losses | tokens).items():
            self._sums[name] = self._sums.get(name, torch.zeros(())) + value.detach().cpu().double()

    def add_step(self, grad_norm: float) -> None:
        """One optimizer step."""
        self._steps += 1
        self._grad_norm += grad_norm

    def means(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Losses per step, token sums per token. A collective."""
        names = ("policy_loss", "value_loss", "entropy", "clip_fraction", "proximal_kl", "tokens")
        total = torch.stack([self._sums.get(name, torch.zeros(())).double() for name in names])
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        total = total.to(device)
        dist.all_reduce(total, group=group)
        sums = dict(zip(names, total.tolist(), strict=True))
        tokens = max(sums.pop("tokens"), 1.0)
        for name in ("clip_fraction", "proximal_kl"):
            sums[name] /= tokens
        for name in ("policy_loss", "value_loss", "entropy"):
            sums[name] /= self._steps
        return {**sums, "grad_norm": self._grad_norm / self._steps}


def batch_metrics(batch: Packed, proximal: Scored, estimate: Estimate, max_tokens: int) -> dict[str, float]:
    """What the batch was like, before any of it was trained on."""
    mask_BT = batch.mask_BT
    lag = batch.lag_BT[mask_BT].float()
    log_weight = (proximal.logprobs_BT - batch.behavior_logprobs_BT)[mask_BT].double()
    weight = log_weight.exp()
    same = batch.lag_BT[mask_BT] == 0
    returns, values = estimate.returns[mask_BT], proximal.values_BT[mask_BT]
    variance = returns.var(unbiased=False).item()
    residual = (returns - values).var(unbiased=False).item()
    return {
        "reward": batch.reward_B.mean().item(),
        "length": mask_BT.sum(-1).float().mean().item(),
        "truncated": batch.truncated_B.float().mean().item(),
        "tokens": float(mask_BT.sum()),
        "tokens_too_old": float((mask_BT & ~batch.fresh_BT).sum()),
        "lag_mean": lag.mean().item(),
        "lag_max": lag.max().item(),
        "behavior_kl": (weight - 1 - log_weight).mean().item(),
        "ess": (weight.sum() ** 2 / (len(weight) * (weight**2).sum())).item(),
        "mismatch": log_weight[same].abs().mean().item() if same.any() else 0.0,
        "explained_variance": 1.0 - residual / variance if variance > 0 else 0.0,
    }
