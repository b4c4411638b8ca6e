"""Tensor and expert parallelism: weights are split between ranks, and FSDP2 shards the parts.

    tensor   a rank has a share of every layer's heads and MLP units. Ranks gather the slices of their tokens
             (context_parallel.py) before attention and MLP, and reduce-scatter the results to slices: sequence
             parallelism, https://arxiv.org/abs/2205.05198, figure 5
    expert   a rank has a share of every layer's experts, and tokens are sent to it (expert_parallel.py)

A split weight is a DTensor over the ranks that split it. FSDP2 shards each part over the ranks of the replica that have
the same part, and every other weight over all ranks of the replica. A rank's gradient covers only its own tokens or its
own part, so FSDP2 sums gradients. t ranks that split a weight, S tokens of a slice.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from streamppo.config.learner import Mesh
from streamppo.errors import ModelError
from streamppo.learner.parallel import expert_parallel
from streamppo.learner.parallel.routing import experts_of

REPLICATE, PART = "replicate", "part"
"""The names of two mesh dimensions: the replicas, and the ranks that split a weight."""
EXPERTS = "moe_tp_experts"
"""The name, in transformers' plans for a family, of the module with a layer's experts."""
BY_TOKEN = ("hidden_states", "position_embeddings")
"""The keyword arguments of attention and MLP that have an entry per token, as all positional arguments have."""
TOKENS = -2
"""The dimension of tokens in arguments of attention and MLP."""
Move = Callable[[Tensor, dist.ProcessGroup], Tensor]


class TensorParallelSpec(NamedTuple):
    """The meshes that split weights, with the dimensions [replicas, if several; ranks that shard a part; parts]."""

    tensor: DeviceMesh | None = None
    expert: DeviceMesh | None = None

    @property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        tensor, expert = self
        return tuple(mesh for mesh in (tensor, None if expert is tensor else expert) if mesh is not None)

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(group for mesh in self.meshes for group in mesh.get_all_groups())


def cut_of(device: str, config: Mesh) -> TensorParallelSpec:
    """Make the meshes of `config`. A collective."""
    shards = config.shards(dist.get_world_size())

    def mesh_of(parts: int) -> DeviceMesh | None:
        if parts == 1:
            return None
        shape, names = (config.replicate, shards // parts, parts), (REPLICATE, "shard", PART)
        first = config.replicate == 1
        return init_device_mesh(device, shape[first:], mesh_dim_names=names[first:])

    tensor = mesh_of(config.tensor)
    return TensorParallelSpec(tensor, tensor if config.expert == config.tensor else mesh_of(config.expert))


def refusal(config: Any, ranks: int) -> str:
    """The reason why `ranks` ranks cannot split the experts of a model of transformers' `config`; "" if they can."""
    if ranks == 1:
        return ""
    choice, model = f"learner.mesh.expert = {ranks}", repr(config.name_or_path)
    if not _names(config, EXPERTS):
        return f"{choice} is not possible: transformers has no plan that splits the experts of {model}"
    experts = experts_of(config)
    return f"{choice} must divide the {experts} experts of {model}" if experts % ranks else ""


def cut_parameters(transformer: Any, layer: nn.Module) -> tuple[int, int]:
    """Count the parameters of a `layer` of `transformer` that tensor and expert parallelism split."""
    (layer_name,) = [name for name, module in transformer.named_modules() if module is layer]
    by_tensor = _names(transformer.config, "colwise") | _names(transformer.config, "rowwise")
    experts, counts = _names(transformer.config, EXPERTS), [0, 0]
    for name, module in layer.named_modules():
        pattern = _pattern(f"{layer_name}.{name}")
        if type(module) is nn.Linear and pattern in by_tensor:
            counts[0] += module.weight.numel()
        if pattern in experts:
            counts[1] += sum(parameter.numel() for parameter in module.parameters())
    return counts[0], counts[1]


def cut_weights(transformer: Any, cut: TensorParallelSpec) -> None:
    """Split the weights of `transformer`, on the meta device, between ranks. Raises `ModelError` if it cannot."""
    modules = dict(transformer.named_modules())
    if cut.expert is not None and (refused := refusal(transformer.config, cut.expert[PART].size())):
        raise ModelError(refused)
    if cut.tensor is not None:
        _cut_layers(transformer.config, modules, cut.tensor)
    if cut.expert is not None:
        names = _names(transformer.config, EXPERTS)
        for name, module in modules.items():
            if _pattern(name) in names:
                _cut_experts(module, name, cut.expert)


def shard_fully(module: nn.Module, mesh: DeviceMesh, cut: TensorParallelSpec, fully_shard: Callable[..., Any]) -> None:
    """Shard `module` over `mesh` by FSDP2's `fully_shard`; every rank shards its part of a split weight.

    Gradients are summed, not averaged, because weights are sharded over different numbers of ranks.
    """
    fully_shard(module, mesh=mesh, shard_placement_fn=_placement(cut) if cut.meshes else None)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _placement(cut: TensorParallelSpec) -> Callable[[nn.Parameter], object]:
    """Return a function that maps a split weight to the ranks that shard it. Raises `ModelError` for an old torch."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    except ImportError:
        raise ModelError(
            f"learner.mesh.tensor and learner.mesh.expert need a newer torch than {torch.__version__}, whose FSDP2 "
            "shards all weights of a layer over the same ranks: install torch 2.13, or set both to 1"
        ) from None
    infos = [(mesh[PART], _mesh_info(mesh)) for mesh in cut.meshes]

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        if not isinstance(parameter, DTensor):
            return None
        (info,) = [info for part, info in infos if part == parameter.device_mesh]
        return ShardPlacementResult(Shard(0), info)

    return place


def _cut_layers(config: Any, modules: dict[str, nn.Module], mesh: DeviceMesh) -> None:
    group, blocks = mesh.get_group(PART), dict[str, nn.Module]()
    by_rows, by_columns = _names(config, "colwise"), _names(config, "rowwise")
    for name, module in modules.items():
        if type(module) is not nn.Linear or _pattern(name) not in by_rows | by_columns:
            continue
        if _pattern(name) in by_rows:
            _cut_parameter(module, "weight", name, 0, mesh)
            if module.bias is not None:
                _cut_parameter(module, "bias", name, 0, mesh)
            module.forward = partial(_with_parts, module, module.forward)  # pyright: ignore[reportAttributeAccessIssue]
            block = name.rpartition(".")[0]
            blocks[block] = modules[block]
        else:
            _cut_parameter(module, "weight", name, 1, mesh)
            module.forward = partial(_row_parallel_output, module, group)  # pyright: ignore[reportAttributeAccessIssue]
    if not blocks:
        raise ModelError(
            f"learner.mesh.tensor = {mesh[PART].size()} is not possible: transformers has no plan that splits this "
            "model's layers"
        )
    for block in blocks.values():
        block.register_forward_pre_hook(partial(_gather_arguments, group), with_kwargs=True)


def _cut_experts(module: Any, name: str, mesh: DeviceMesh) -> None:
    for leaf, parameter in list(module.named_parameters()):
        if len(parameter) != module.num_experts:
            raise ModelError(f"learner.mesh.expert: {name}.{leaf} is not one tensor for each expert")
        _cut_parameter(module, leaf, name, 0, mesh)
    module.num_experts //= mesh[PART].size()
    compute = partial(_with_parts, module, module.forward)
    module.forward = partial(expert_parallel.dispatch_to_experts, compute, mesh.get_group(PART), module.num_experts)


def _cut_parameter(module: nn.Module, leaf: str, name: str, dimension: int, mesh: DeviceMesh) -> None:
    parameter, parts = module.get_parameter(leaf), mesh[PART].size()
    if parameter.shape[dimension] % parts:
        size = parameter.shape[dimension]
        raise ModelError(f"learner.mesh: {name}.{leaf} has {size} entries, which cannot be split between {parts} ranks")
    distributed = distribute_tensor(parameter, mesh[PART], [Shard(dimension)], src_data_rank=None)
    module.register_parameter(leaf, nn.Parameter(distributed, requires_grad=parameter.requires_grad))


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    """FSDP2's mesh info for a weight that is split over `mesh`: the ranks that have the same part."""
    if mesh.ndim == 2:
        return FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
    return HSDPMeshInfo(mesh[REPLICATE, "shard"], shard_mesh_dim=1, replicate_mesh_dim=0)


def _names(config: Any, style: str) -> set[str]:
    plans = (getattr(config, name, None) or {} for name in ("base_model_tp_plan", "base_model_ep_plan"))
    return {name for plan in plans for name, planned in plan.items() if planned == style}


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _with_parts(module: nn.Module, forward: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    with _parts(module):
        return forward(*arguments)


def _row_parallel_output(module: Any, group: dist.ProcessGroup, units: Tensor) -> Tensor:
    """The layer's output for this rank's slice of the tokens, from the partial products of all ranks."""
    with _parts(module):
        partial_sum = nn.functional.linear(units, module.weight)
    summed: Tensor = _Collective.apply(partial_sum, group, _reduce_slices, _gather_slices)  # pyright: ignore[reportAssignmentType]
    return summed if module.bias is None else summed + module.bias


def _gather_arguments(
    group: dist.ProcessGroup, block: nn.Module, arguments: tuple[object, ...], by_keyword: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """In a block's arguments, replace this rank's slice of tokens by the tokens of all ranks of `group`."""

    def gather(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(gather(item) for item in value)
        return _Collective.apply(value, group, _gather_slices, _reduce_slices)

    by_name = {name: gather(item) if name in BY_TOKEN else item for name, item in by_keyword.items()}
    return tuple(gather(item) for item in arguments), by_name


@contextmanager
def _parts(module: nn.Module) -> Iterator[None]:
    """Make the weights of `module` plain tensors, this rank's parts, so that it computes with them."""
    parameters = dict(module._parameters)
    cut = {name: parameter.to_local() for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    for name, part in cut.items():
        del module._parameters[name]
        module.__dict__[name] = part
    try:
        yield
    finally:
        for name in cut:
            del module.__dict__[name]
        # Restore the order of parameters, which is the order of names in a version.
        module._parameters.clear()
        module._parameters.update(parameters)


class _Collective(torch.autograd.Function):
    """Forward: apply `forth` to a tensor between the ranks of a group. Backward: apply `back` to its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, forth: Move, back: Move) -> Tensor:
        ctx.collective = group, back
        return forth(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        group, back = ctx.collective
        return back(gradient, group), None, None, None


def _gather_slices(slice_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    received = slice_S.new_empty(ranks, *slice_S.shape)
    # Before torch 2.13 the function was `all_gather_into_tensor`; torch 2.13 warns of that name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, slice_S.contiguous()[None], group=group)
    return torch.cat(received.unbind(), TOKENS)


def _reduce_slices(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = torch.stack(whole.chunk(dist.get_world_size(group), TOKENS))
    received = torch.empty_like(sent[:1])
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(received, sent, group=group)
    return received[0]


def copies(mesh: DeviceMesh) -> int:
    """The number of replicas of a model in `mesh`, the mesh of a sharded weight."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(REPLICATE)) if REPLICATE in names else 1


def is_cut_by_columns(parameter: Tensor) -> bool:
    """True for a weight that is split by columns, so that a rank has a part of every row."""
    return isinstance(parameter, DTensor) and any(
        placement.is_shard() and placement.dim == 1  # pyright: ignore[reportAttributeAccessIssue]
        for placement in parameter.placements
    )


def own_rows(rows: int, parameter: DTensor) -> tuple[int, int]:
    """The begin and end of the rows that `whole_rows` gives this rank, out of `rows`."""
    bounds, part = _bounds(rows, parameter), parameter.device_mesh[PART].get_local_rank()
    return bounds[part], bounds[part + 1]


def whole_rows(own_RC: Tensor, parameter: DTensor) -> Tensor:
    """Exchange this rank's columns of some rows for all columns of its `own_rows`. A collective of the PART ranks."""
    part = parameter.device_mesh[PART]
    sent = [end - begin for begin, end in pairwise(_bounds(len(own_RC), parameter))]
    num_rows = sent[part.get_local_rank()]
    received = own_RC.new_empty(num_rows * part.size(), *own_RC.shape[1:])
    dist.all_to_all_single(received, own_RC.contiguous(), [num_rows] * part.size(), sent, group=part.get_group())
    return torch.cat(received.chunk(part.size()), 1) if num_rows else received.new_empty(0, *parameter.shape[1:])


def _bounds(rows: int, parameter: DTensor) -> list[int]:
    parts = parameter.device_mesh[PART].size()
    return [at * rows // parts for at in range(parts + 1)]


def whole_of(weight: DTensor) -> Tensor:
    """Return the whole weight. A collective."""
    # Redistribute one mesh dimension at a time: for several at once torch warns of an inaccuracy that only sums have.
    placements = list(weight.placements)
    for dimension in range(weight.device_mesh.ndim):
        placements[dimension] = Replicate()
        weight = weight.redistribute(placements=placements)
    return weight.to_local()
