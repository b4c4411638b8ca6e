"""Makes the tensors of a version for an engine: pushed weights, or frozen weights with merged pushed adapters.

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
from streamppo.weights.adapters import merge_adapters
from streamppo.weights.content import check, hash_tensor
from streamppo.weights.models import loading as models
from streamppo.weights.replica import Replica


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
