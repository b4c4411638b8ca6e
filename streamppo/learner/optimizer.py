"""AdamW over the policy and its critic, each with its own learning rate."""

import torch

from streamppo.config import Config
from streamppo.learner.model import Policy


def adamw(policy: Policy, config: Config) -> torch.optim.AdamW:
    """Two groups, policy first, critic second; `full_lr` of each is its rate before any schedule.

    Every parameter has its moments from the start: torch makes them at the first gradient, and a checkpoint in which
    some are missing (a critic that nobody uses, a policy that still stands still) cannot be loaded.
    """
    learner = config.learner
    parameters = (policy.lm.parameters(), policy.critic_parameters())
    groups = [
        {"params": list(some), "full_lr": full_lr} for some, full_lr in zip(parameters, full_lrs(config), strict=True)
    ]
    made = torch.optim.AdamW(groups, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay)
    for parameter in policy.parameters():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        made.state[parameter] = {"step": torch.zeros(()), **moments}
    return made


def full_lrs(config: Config) -> tuple[float, float]:
    """Learning rates of policy and critic before any schedule."""
    return config.learner.lr, config.algorithm.critic.lr or config.learner.lr
