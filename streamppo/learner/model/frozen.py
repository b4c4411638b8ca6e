"""Frozen models on the learner's ranks: the reference of the KL, and the teacher of on-policy distillation.

reference    the run's first model, which stays fixed or is moved towards the policy at intervals; with adapters it is
             the policy with its adapters switched off, and no second model is loaded
teacher      a model that scores the policy's tokens
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from streamppo.config.sections import Config
from streamppo.errors import ModelError, TaskError
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.model import adapters, hf_files, load_policy
from streamppo.learner.model.policy import Part, Policy, PolicyOutput, local
from streamppo.learner.parallel.context_parallel import Slices


class NoReferenceWeights:
    """The run's first model, for passes without gradient: the policy's weights with its adapters switched off."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, rows: PaddedBatch, part: Part) -> PolicyOutput:
        self._scale_adapters(0.0)
        # The load of the experts is that of the policy.
        self._policy.routers.counts = False
        try:
            return self._policy(rows, part)
        finally:
            self._scale_adapters(1.0)
            self._policy.routers.counts = True

    def _scale_adapters(self, share: float) -> None:
        from peft.tuners.lora import LoraLayer

        for module in self._policy.lm.modules():
            if isinstance(module, LoraLayer):
                module.set_scale(adapters.NAME, share)


def load_reference(
    config: Config,
    model_path: str,
    mesh: DeviceMesh,
    leader: Policy,
    present: Policy | None,
    *,
    has_moved: bool = False,
) -> Policy | NoReferenceWeights | None:
    """Return the reference of `config`, or None without a KL; `leader` is the policy that trains. A collective.

    Without adapters the reference has separate weights, which are read unless a `present` reference is given. They are
    float32 if the reference follows the policy, or if it `has_moved` and a checkpoint fills it; otherwise they are in
    the compute type.
    """
    kl, temperature = config.algorithm.kl, config.rollout.temperature
    if not kl.on:
        return None
    if config.model.lora is not None:
        return NoReferenceWeights(leader)
    master = has_moved or kl.follow_every > 0
    if present is not None and master and next(present.lm.parameters()).dtype != torch.float32:
        present = None
    reference = present or load_policy.load(
        config.model, model_path, temperature, mesh, offload=kl.offload, master=master, slices=leader.slices
    )
    reference.temperature = temperature
    reference.float32_head = config.model.float32_head
    return reference


def separate_reference(reference: Policy | NoReferenceWeights | None) -> Policy | None:
    """The reference if it has separate weights, else None."""
    return reference if isinstance(reference, Policy) else None


def follow(reference: Policy, leader: Policy, share: float) -> None:
    """Move every weight of `reference` by `share` of its difference to `leader`; both are sharded alike.

        reference += share * (leader - reference)

    TR-DPO, https://arxiv.org/abs/2404.09656, equations 3 (share below 1) and 4 (share = 1: equal bit for bit).
    """
    # After a pass the leader's parameters may be gathered weights; `reshard` makes them shards again.
    if isinstance(leader, FSDPModule):
        leader.reshard()
    leader_weights = dict(leader.lm.named_parameters())
    with torch.no_grad():
        for name, parameter in reference.lm.named_parameters():
            shard, target = local(parameter), local(leader_weights[name])
            shard.lerp_(target.to(shard.device, shard.dtype), share)


def load_teacher(
    config: Config, model_path: str, mesh: DeviceMesh, present: Policy | None, slices: Slices
) -> Policy | None:
    """Return the `present` teacher, or load the teacher of `config`; its rows are split into `slices`. A collective.

    Returns None without a teacher, and for a teacher at a url. Raises `ModelError` if the teacher's path has no model,
    or if the teacher's tokens are not those of the model at `model_path`.
    """
    teacher, temperature = config.algorithm.teacher, config.rollout.temperature
    if not teacher.model:
        return None
    if present is None:
        check_teacher_tokens(teacher.model, model_path)
        present = load_policy.load(
            config.model, teacher.model, temperature, mesh, offload=teacher.offload, master=False, slices=slices
        )
    present.temperature = temperature
    present.float32_head = config.model.float32_head
    return present


def check_teacher_tokens(teacher: str, model_path: str) -> None:
    """Raise `ModelError` unless the `teacher` gives every token of the model at `model_path` the same number."""
    try:
        hf_files.check_tokens("teacher", teacher, model_path)
    except TaskError as error:
        raise ModelError(f"the teacher {teacher!r} and the policy cannot be compared: {error}") from error
