"""Resolves `model.gradient_checkpointing = "auto"` by the memory that a rank needs and the memory of its device."""

import logging
from typing import Literal

import torch
import torch.distributed as dist
from msgspec import structs

from streamppo.config.model import Model
from streamppo.config.sections import Config, longest_row
from streamppo.errors import ModelError
from streamppo.learner import memory
from streamppo.telemetry import host_memory
from streamppo.weights.models.settings import read_settings

FITS = 0.85
"""The share of a GPU's free memory that a rank may take; the allocator's reserve, CUDA and NCCL need the remainder."""
FITS_ON_CPU = 0.5
"""The share of a machine's memory that its ranks may take; engines, object store and checkpoints need the remainder."""

log = logging.getLogger(__name__)


def checkpointing_for(config: Config, model: memory.ModelSizes, longest: int, free: int) -> Literal["off", "full"]:
    """Resolve `model.gradient_checkpointing = "auto"` for `free` bytes of memory and rows of up to `longest` tokens.

    off     if a rank that keeps all activations fits in its room
    full    otherwise

    On a GPU, a rank's room is `FITS` of the GPU's free memory, times `learner.gpus` if ranks share a GPU. On a CPU,
    `free` is the memory of the machine, and all ranks divide `FITS_ON_CPU` of it. Results do not depend on the choice.
    """
    learner = config.learner
    room = FITS * min(1.0, learner.gpus) * free if learner.gpus else FITS_ON_CPU * free / learner.ranks
    return "full" if memory.rank(config, model, longest).total > room else "off"


def resolve(config: Config, model: memory.ModelSizes, longest: int, gpu_bytes: int) -> Config:
    """Resolve gradient checkpointing "auto" in `config` for GPUs of `gpu_bytes` or, without GPUs, for this machine."""
    if config.model.gradient_checkpointing != "auto":
        return config
    free = gpu_bytes if config.learner.gpus else host_memory.total_mib() * 2**20
    kind = checkpointing_for(config, model, longest, free)
    return structs.replace(config, model=structs.replace(config.model, gradient_checkpointing=kind))


def resolve_on_rank(config: Config, path: str, device: str) -> Model:
    """Resolve "auto" for a rank on a `device`, before the model at `path` is loaded onto it. A collective.

    The rank with the least free memory decides. If the memory of a model is unknown, all activations are kept.
    """
    if config.model.gradient_checkpointing != "auto":
        return config.model
    kind, reason = _checkpointing_and_reason(config, path, _free(device))
    if dist.get_rank() == 0 and (device != "cpu" or kind != "off"):
        log.info('model.gradient_checkpointing = "%s": %s', kind, reason)
    return structs.replace(config.model, gradient_checkpointing=kind)


def _checkpointing_and_reason(config: Config, path: str, free: int) -> tuple[Literal["off", "full"], str]:
    longest = longest_row(config)
    try:
        model = memory.sizes(read_settings(path), config.model)
    except ModelError as error:
        return "off", str(error)
    needed = memory.rank(config, model, longest).total
    there = f"{free / 2**30:.1f} GiB " + ("are free" if config.learner.gpus else "in this machine")
    numbers = f"about {needed / 2**30:.1f} GiB with all activations kept, {there}"
    return checkpointing_for(config, model, longest, free), numbers


def _free(device: str) -> int:
    here = host_memory.total_mib() * 2**20 if device == "cpu" else torch.cuda.mem_get_info()[0]
    free = torch.tensor(here, device=device)
    dist.all_reduce(free, dist.ReduceOp.MIN)
    return int(free)
