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
    groups = [
        {"params": list(policy.lm.parameters()), "full_lr": learner.lr},
        {"params": list(policy.critic_parameters()), "full_lr": config.algorithm.critic.lr or learner.lr},
    ]
    made = torch.optim.AdamW(groups, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay)
    for parameter in policy.parameters():
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        made.state[parameter] = {"step": torch.zeros(()), **moments}
    return made
