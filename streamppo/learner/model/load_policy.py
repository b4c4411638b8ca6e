"""Loads the policy from a model's files: it is sharded on the meta device first, then filled rank by rank."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from streamppo.config.algorithm import CRITICS
from streamppo.config.model import Lora, Model
from streamppo.errors import ModelError
from streamppo.learner.attention import attention, layers, prefix_kv, prefix_sharing, short_rows
from streamppo.learner.device import from_first_rank, gather
from streamppo.learner.model import adapters, hf_files, lm_head, norms, weight_files
from streamppo.learner.model.hf_files import CriticStart
from streamppo.learner.model.policy import Policy, local
from streamppo.learner.model.working_copy import WorkingCopy
from streamppo.learner.parallel import context_parallel, tensor_parallel
from streamppo.learner.parallel.context_parallel import Slices
from streamppo.learner.parallel.routing import Routers
from streamppo.weights.models.fit import first_not_finite
from streamppo.weights.models.loading import fetch, not_finite_message
from streamppo.weights.models.settings import is_tied, read_settings, settings

SHARD_LAYERS_ABOVE = 16_000_000
"""The number of parameters above which FSDP gathers layer by layer; a smaller model is gathered at once."""


def load(
    config: Model,
    path: str | Path,
    temperature: float,
    mesh: DeviceMesh,
    critic: str = "head",
    *,
    offload: bool = False,
    master: bool = True,
    lora: Lora | None = None,
    slices: Slices = context_parallel.WHOLE,
) -> Policy:
    """Load a Hugging Face causal LM with fp32 master weights and shard it over `mesh`. A collective.

    Without `master` the weights are in the compute type, which saves memory and changes no result of a frozen model. If
    all ranks have the files of a large model, each reads its own rows (weight_files.py). If not, rank 0 reads all
    weights and sends them tensor by tensor, and other ranks need only config.json. The states of random number
    generators are unchanged.

    `critic` is the configuration's choice. `offload` keeps the shards in CPU memory. With `lora` the policy's weights
    are frozen, in the compute type, and its adapters are trained. Rows are split into `slices`. Raises `ModelError` if
    a model cannot be loaded, if its log-probs differ from those of `Policy`, or if it leaks state between rows in the
    configured layout.
    """
    device = mesh.device_type
    with torch.random.fork_rng(devices=[]):
        if not dist.get_rank():
            fetch(path)
        untied = from_first_rank(not dist.get_rank() and not is_tied(settings(path)))
        plan = weight_files.plan(str(path), critic, adapted=lora is not None)
        cpu_policy = _on_cpu(path, critic, lora, plan) if dist.get_rank() == 0 else None
    implementation = attention.agree_on(attention.choose(config, device))
    transformers = [] if cpu_policy is None else cpu_policy.transformers
    implementation = attention.leak_free_attention(implementation, config, path, transformers)
    configs = [read_settings(source) for source in (path, critic) if source not in CRITICS]
    implementation = attention.fall_back(implementation, config, configs)
    share_prompts = config.share_prompts and implementation != "eager" and prefix_sharing.can_share(transformers)
    shard = partial(shard_without_weights, offload=offload, master=master, lora=lora, slices=slices, untied=untied)
    policy = shard(config, path, mesh, critic, implementation)
    policy.temperature, policy.share_prompts = temperature, share_prompts
    if share_prompts and policy.layout is attention.joined:
        prefix_kv.prepare(policy.transformers)
    policy.to_empty(device="cpu" if offload else device)
    if not isinstance(policy, FSDPModule):
        # `to_empty` has given tied weights separate memory.
        policy.lm.tie_weights()
    if plan is None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(policy, {} if cpu_policy is None else dict(cpu_policy.state_dict()), options=options)
    else:
        _read_rows(policy, plan, path)
    _send_buffers(policy, cpu_policy, device)
    policy.unknown_V = lm_head.unknown_bias(path, len(policy.lm.get_output_embeddings().weight), device)
    if not isinstance(policy, FSDPModule) and config.dtype != "float32":
        # The value head needs no copy, because values are computed in float32, as with FSDP.
        policy.working_copy = WorkingCopy([policy.lm, *filter(None, [policy.critic])], getattr(torch, config.dtype))
    return policy


def shard_without_weights(
    config: Model,
    path: str | Path,
    mesh: DeviceMesh,
    critic: str,
    attends: str,
    *,
    offload: bool = False,
    master: bool = True,
    lora: Lora | None = None,
    slices: Slices = context_parallel.WHOLE,
    untied: bool = False,
) -> Policy:
    """Make the policy of config.json at `path` on the meta device, sharded over `mesh`, without allocating weights.

    A single rank does not shard: FSDP would cost a tenth of a small model's update. `attends` is transformers' name of
    the attention; `untied` is as in `settings`. Raises `ModelError` if rows cannot be split into `slices`.
    """
    with torch.device("meta"):
        lm, critic_start = _read(path, critic, context_parallel.name_of(attends, slices), weights=False, untied=untied)
        if lora is not None:
            adapters.add(lm, lora, config.dtype)
        if not master:
            for parameter in lm.parameters():
                parameter.data = parameter.data.to(getattr(torch, config.dtype))
        policy = Policy(lm, 1.0, critic_start.transformer, layout=attention.layout(attends))
        policy.slices, policy.checkpointing = slices, layers.kind(config)
        if not config.compile:
            policy.routers = Routers(lm.base_model)
        policy.float32_head = config.float32_head
    transformers = policy.transformers
    for transformer in transformers:
        if refused := context_parallel.refusal(transformer.config, slices.ranks):
            raise ModelError(refused)
        tensor_parallel.cut_weights(transformer, slices.cut)
        if config.compile:
            layers.compile_layers(transformer)
        elif (config.attention, attends, mesh.device_type) == ("auto", "sdpa", "cpu") and slices.ranks == 1:
            short_rows.prepare(transformer)
        if not config.compile:
            norms.prepare(transformer)
        layers.checkpoint_activations(transformer, policy.checkpointing)
    if not is_whole(mesh.size(), offload=offload):
        _shard(policy, config.dtype, mesh, slices, offload=offload)
    return policy


def is_whole(ranks: int, *, offload: bool) -> bool:
    """True if a policy on this many ranks is not sharded by FSDP: on a single rank without offload."""
    return ranks == 1 and not offload


def _shard(policy: Policy, dtype: str, mesh: DeviceMesh, slices: Slices, *, offload: bool) -> None:
    compute = torch.bfloat16 if dtype == "bfloat16" else None
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    # FSDP moves its shards layer by layer, so that no GPU ever holds the whole model in float32.
    offloading = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    sharding = partial(fully_shard, mp_policy=precision, offload_policy=offloading)
    if sum(parameter.numel() for parameter in policy.parameters()) > SHARD_LAYERS_ABOVE:
        for transformer in policy.transformers:
            for layer in layers.layers_of(transformer):
                tensor_parallel.shard_fully(layer, mesh, slices.cut, sharding)
    # The value head is float32: a bfloat16 weight (8 bits) would change values by up to 1 / 256 of their size.
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    exactly = partial(fully_shard, mp_policy=exact, offload_policy=offloading)
    tensor_parallel.shard_fully(policy.value_head, mesh, slices.cut, exactly)
    tensor_parallel.shard_fully(policy, mesh, slices.cut, sharding)


def _read(
    path: str | Path, critic: str, implementation: str, *, weights: bool, untied: bool = False
) -> tuple[Any, CriticStart]:
    lm = hf_files.read(path, implementation, weights=weights, untied=untied)
    return lm, hf_files.critic(critic, path, implementation, weights=weights)


def _on_cpu(path: str | Path, critic: str, lora: Lora | None, plan: weight_files.LoadPlan | None) -> Policy:
    """The policy with all its weights, on the CPU; with a `plan` only its first layers."""
    if plan is not None:
        lm_head.check(plan.first_layers, path)
        return Policy(plan.first_layers, 1.0, None if critic == "head" else deepcopy(plan.first_layers.base_model))
    lm, critic_start = _read(path, critic, "eager", weights=True)
    lm_head.check(lm, path)
    if lora is not None:
        adapters.add(lm, lora, "float32")
    policy = Policy(lm, 1.0, critic_start.transformer)
    if critic_start.head_1D is not None:
        with torch.no_grad():
            policy.value_head.weight.copy_(critic_start.head_1D)
    return policy


@torch.no_grad()
def _read_rows(policy: Policy, plan: weight_files.LoadPlan, path: str | Path) -> None:
    """Read this rank's shards; a value head in no file starts at 0. Raises `ModelError` on all ranks for NaN."""
    for name, parameter in policy.named_parameters():
        shard = local(parameter)
        if shard.numel():
            begin, *others = _shard_slices(parameter)
            rows = plan.read(name, begin.start, begin.stop)
            shard.zero_() if rows is None else shard.copy_(rows[(slice(None), *others)])
    wrong = first_not_finite({name: local(weight) for name, weight in policy.named_parameters()})
    if name := next(filter(None, gather(wrong)), ""):
        raise ModelError(not_finite_message(path, name))


def _shard_slices(parameter: Tensor) -> list[slice]:
    """The slices of a weight, one per dimension, that are this rank's shard, which must not be empty."""
    if not isinstance(parameter, DTensor):
        return [slice(0, size) for size in parameter.shape]
    chunk = parameter.__create_chunk_list__()[0]
    return [slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]


def _send_buffers(policy: Policy, cpu_policy: Policy | None, device: str) -> None:
    """Broadcast buffers, such as rotary frequencies, which no file has, from rank 0's `cpu_policy` to every rank."""
    modules = {} if cpu_policy is None else dict(cpu_policy.named_modules())
    for module_name, module in policy.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            source = modules[module_name].get_buffer(name) if modules else torch.empty_like(buffer)
            on_device = source.to(device)
            dist.broadcast(on_device, src=0)
            setattr(module, name, on_device)
