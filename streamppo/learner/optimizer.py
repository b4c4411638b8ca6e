"""AdamW over the policy and its critic, each with its own learning rate."""

import torch

from streamppo.config import Config
from streamppo.learner.model import Policy


def adamw(policy: Policy, config: Config) -> torch.optim.AdamW:
    """Two groups, policy first, critic second; `full_lr` of each is its rate before any schedule.

    Every parameter has its moments from the start: torch makes them at the first gradient, and a checkpoint in which
    some are missing (a critic that nobody uses, a policy that still stands still) cannot be loaded.
    """
    groups = [{"params": list(some)} for some in (policy.lm.parameters(), policy.critic_parameters())]
    made = torch.optim.AdamW(groups, lr=config.learner.lr)
    configure(made, config)
    for parameter in policy.parameters():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        made.state[parameter] = {"step": torch.zeros(()), **moments}
    return made


def configure(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Set what the configuration says; a checkpoint brings the settings of the configuration that wrote it."""
    learner = config.learner
    full_lrs = (learner.lr, config.algorithm.critic.lr or learner.lr)
    for group, full_lr in zip(optimizer.param_groups, full_lrs, strict=True):
        group.update(full_lr=full_lr, betas=learner.betas, weight_decay=learner.weight_decay)
