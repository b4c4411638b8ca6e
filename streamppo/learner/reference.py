"""The reference of the KL: the run's first model, which stands still or moves to the policy now and then."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from streamppo.config.sections import Config
from streamppo.learner import policy
from streamppo.learner.policy import Policy


def load(config: Config, model_path: str, mesh: DeviceMesh, known: Policy | None) -> Policy | None:
    """Load the run's first model, as the configuration wants it; it is read only if it is not `known`. A collective."""
    kl, temperature = config.algorithm.kl, config.rollout.temperature
    if not kl.on:
        return None
    made = known or policy.load(config.model, model_path, temperature, mesh, offload=kl.offload)
    made.temperature, made.float32_head = temperature, config.model.float32_head
    return made


def follow(reference: Policy, leader: Policy, share: float) -> None:
    """Move every weight of `reference` by `share` of the way to `leader`, both sharded alike.

        reference += share * (leader - reference)

    TR-DPO, https://arxiv.org/abs/2404.09656, equations 3 (share below 1) and 4 (share = 1: the leader itself, bit for
    bit). The critic is none of it.
    """
    # Gathered weights are copies: the shards alone stay.
    leader.reshard()  # pyright: ignore[reportCallIssue]
    theirs = dict(leader.lm.named_parameters())
    with torch.no_grad():
        for name, parameter in reference.lm.named_parameters():
            own, target = _shard(parameter), _shard(theirs[name])
            own.lerp_(target.to(own.device, own.dtype), share)


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
