"""AdamW for the policy and its critic, each with a separate learning rate, and clipping of sharded gradients."""

import math
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from streamppo.config.learner import Learner
from streamppo.config.sections import Config
from streamppo.learner.device import add_up
from streamppo.learner.model.policy import Policy, local
from streamppo.learner.parallel.tensor_parallel import copies

Norm = Literal["2-norm", "max-norm"]


def adamw(policy: Policy, config: Config) -> torch.optim.AdamW:
    """Make AdamW with two groups, policy first, critic second; `full_lr` is a group's rate before any schedule.

    Every parameter has moments from the start: torch would create them at the first gradient, and a checkpoint without
    the moments of an unused critic, or of a policy in warm-up, could not be loaded.
    """
    policy_weights = [parameter for parameter in policy.lm.parameters() if parameter.requires_grad]
    groups = [{"params": parameters} for parameters in (policy_weights, list(policy.critic_parameters()))]
    # `fused` is one kernel for a tensor's arithmetic; the default makes a dozen passes over every tensor.
    optimizer = torch.optim.AdamW(groups, lr=config.learner.lr, fused=True)
    configure(optimizer, config)
    # torch does not count the writes of a fused step in a tensor's version, and a working copy compares versions.
    optimizer.register_step_post_hook(_count_writes)
    for parameter in (member for group in groups for member in group["params"]):
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    return optimizer


def _count_writes(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        torch.autograd.graph.increment_version(group["params"])


def configure(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Set the values of `config`, which replace the values from a checkpoint."""
    learner = config.learner
    full_lrs = (learner.lr, config.algorithm.critic.lr or learner.lr)
    for group, full_lr in zip(optimizer.param_groups, full_lrs, strict=True):
        group.update(full_lr=full_lr, betas=learner.betas, weight_decay=learner.weight_decay)


def follow_schedule(optimizer: torch.optim.Optimizer, config: Config, version: int) -> None:
    """Set the learning rates of the update after `version`; before `critic.warmup_updates` the policy's is 0."""
    learner, frozen_until = config.learner, config.algorithm.critic.warmup_updates
    trained, updates = version - frozen_until, config.updates - frozen_until
    policy = 0.0 if trained < 0 else lr_share(learner, trained, updates)
    shares = (policy, lr_share(learner, version, config.updates))
    for group, share in zip(optimizer.param_groups, shares, strict=True):
        group["lr"] = group["full_lr"] * share


def lower_policy(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Multiply the policy's learning rate by `share`; the critic keeps its rate, because its loss has no weights."""
    optimizer.param_groups[0]["lr"] *= share


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set every group's learning rate to `share` of its full rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * share


def lr_share(config: Learner, version: int, updates: int) -> float:
    """The share of the full learning rate for the update after `version`: warm-up, then decay."""
    if version < config.warmup_updates:
        return (version + 1) / config.warmup_updates
    progress = (version - config.warmup_updates) / max(1, updates - config.warmup_updates)
    floor = config.final_lr_share
    match config.decay:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - progress)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def clip(parameters: Iterable[nn.Parameter], bound: float, norm: Norm) -> float:
    """Scale all gradients to a common norm of at most `bound`; return the norm before scaling. A collective.

    The max-norm is the largest absolute entry. With NaN in a gradient the result is inf or NaN.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # torch's own norms need all weights sharded over the same ranks, with a row on each rank.
    shards = [local(gradient) for gradient in gradients]
    if norm == "2-norm":
        squares = torch.nn.utils.get_total_norm(shards).double().square()
        add_up(squares)
        replicas = [copies(gradient.device_mesh) for gradient in gradients[:1] if isinstance(gradient, DTensor)]
        total = (squares / max([1, *replicas])).sqrt().float()
        torch._foreach_mul_(shards, (bound / (total + 1e-6)).clamp(max=1.0))
        return float(total.item())
    sizes = [shard.abs().max() for shard in shards if shard.numel()]
    largest = torch.stack(sizes).max() if sizes else shards[0].new_zeros(())
    # A maximum over ranks may lose a NaN, never an infinity.
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    add_up(largest, op=dist.ReduceOp.MAX)
    if largest > bound:
        for shard in shards:
            shard.mul_(bound / largest)
    return float(largest.item())
