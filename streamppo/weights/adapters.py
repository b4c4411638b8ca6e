"""Low-rank adapters: merged into the frozen weights, at once or for each pushed version of an engine.

    W + scale * B A        for every W [out, in] with an adapter: A [rank, in], B [out, rank]

LoRA, https://arxiv.org/abs/2106.09685, equation 3. In an engine:

pushed adapters     hashes compared with the learner's -> merged, tensor by tensor -> hashed -> checked in the engine
frozen weights      read once from the model's files; hashes compared with the learner's at every push
"""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamppo.config.sections import Config
from streamppo.errors import WeightsError
from streamppo.process import phase
from streamppo.types import Push
from streamppo.weights.content import check, hash_tensor
from streamppo.weights.models import loading as models
from streamppo.weights.replica import Replica

A, B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


def pair_adapters(adapters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (A, B) by the name of their W. Raises `WeightsError` if a tensor is no A or B, or lacks its partner."""
    names = {name.removesuffix(A).removesuffix(B) for name in adapters}
    if wrong := [name for name in names if {name + A, name + B} - adapters.keys()]:
        raise WeightsError(f"{sorted(wrong)[0]} is not an adapter, or lacks the other of its two tensors")
    return {name + WEIGHT: (adapters[name + A], adapters[name + B]) for name in sorted(names)}


@torch.no_grad()
def merge_adapters(frozen: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return all weights of the model in the order of `frozen`. A weight without an adapter is not copied.

    The sum is computed in float32 and rounded once. Raises `WeightsError` for an adapter without a matching weight.
    """
    pairs = pair_adapters(adapters)
    for name, (a, b) in pairs.items():
        shape = None if name not in frozen else tuple(frozen[name].shape)
        if shape != (len(b), a.shape[-1]) or len(a) != b.shape[-1]:
            raise WeightsError(f"the adapter of {name} is {tuple(b.shape)} x {tuple(a.shape)}, the weight {shape}")
    merged = dict(frozen)
    for name, (a, b) in pairs.items():
        merged[name] = torch.add(frozen[name].float(), b.float() @ a.float(), alpha=scale).to(frozen[name].dtype)
    return merged


class Loadable(NamedTuple):
    """The tensors of a model (HF names), and the hash that each must have in the engine."""

    tensors: Mapping[str, Tensor]
    contents: Mapping[str, int]


class WholeModel:
    """Passes on the tensors of pushed whole models. Their hashes are compared where the tensors are copied."""

    async def materialize(self, replica: Replica) -> Loadable:
        """Return the tensors of the version in `replica`; the next version in `replica` may overwrite them."""
        return Loadable(replica.tensors, replica.contents)


class MergedAdapters:
    """Merges pushed LoRA adapters: `frozen` + `scale` * B A."""

    def __init__(self, frozen: Mapping[str, Tensor], scale: float) -> None:
        self._frozen, self._scale = frozen, scale
        self._contents = {name: hash_tensor(tensor) for name, tensor in frozen.items()}

    async def materialize(self, replica: Replica) -> Loadable:
        """Return new tensors of the version in `replica`. Raises `WeightsError` if the version is damaged."""
        return await asyncio.to_thread(self._merge, replica)

    @phase("merge")
    def _merge(self, replica: Replica) -> Loadable:
        assert replica.push is not None, "there is a version"
        self._check_frozen(replica.push)
        check(replica.contents, replica.tensors.items())
        tensors = merge_adapters(self._frozen, replica.tensors, self._scale)
        frozen_hashes = self._contents
        contents = {
            name: frozen_hashes[name] if tensor is self._frozen[name] else hash_tensor(tensor)
            for name, tensor in tensors.items()
        }
        return Loadable(tensors, contents)

    def _check_frozen(self, push: Push) -> None:
        pushed = {tensor.name: tensor.content for tensor in push.frozen}
        if pushed != self._contents:
            names = sorted(name for name in pushed | self._contents if pushed.get(name) != self._contents.get(name))
            raise WeightsError(
                f"version {push.version} has adapters of another model than the one in this actor's files: "
                f"{names[0]} differs, and {len(names) - 1} more"
            )


EngineTensors: TypeAlias = WholeModel | MergedAdapters


def source(config: Config, model_path: str) -> EngineTensors:
    """Return `MergedAdapters` of the model at `model_path` if the run trains adapters, otherwise `WholeModel`."""
    if config.model.lora is None:
        return WholeModel()
    dtype = getattr(torch, config.model.dtype)
    # As in the learner, each tensor is rounded when it is loaded: a whole 32B model in float32 would take 131 GB.
    model = models.load(model_path, dtype=dtype).model
    return MergedAdapters(
        {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}, config.model.lora.scale
    )
