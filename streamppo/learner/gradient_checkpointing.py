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
from streamppo.telemetry import host
from streamppo.weights.models.settings import read_settings

FITS = 0.85
"""The share of its GPU memory that a rank may fill; the allocator's reserve, CUDA and NCCL need the remainder."""
FITS_ON_CPU = 0.5
"""The share of a machine's memory that its ranks may take; engines, object store and checkpoints need the remainder."""

GIB = 2**30
log = logging.getLogger(__name__)


def checkpointing_for(
    config: Config, model: memory.ModelSizes, longest: int, free: int, total: int
) -> Literal["off", "full"]:
    """Resolve `model.gradient_checkpointing = "auto"` for rows of up to `longest` tokens.

    off     if a rank that keeps all activations fits in its room
    full    otherwise

    On a GPU with `free` of `total` bytes, a rank's room is `FITS` of the free memory or, if that is less, of the share
    `learner.gpus` of the GPU. So a rank that restarts while an engine runs makes the same choice as before the engine
    started. On a CPU, all ranks divide `FITS_ON_CPU` of the machine's memory, `total`. Results do not depend on the
    choice.
    """
    learner = config.learner
    room = FITS * min(free, learner.gpus * total) if learner.gpus else FITS_ON_CPU * total / learner.ranks
    return "full" if memory.rank(config, model, longest).total > room else "off"


def resolve(config: Config, model: memory.ModelSizes, longest: int, gpu_bytes: int) -> Config:
    """Resolve gradient checkpointing "auto" in `config` for GPUs of `gpu_bytes` or, without GPUs, for this machine."""
    if config.model.gradient_checkpointing != "auto":
        return config
    total = gpu_bytes if config.learner.gpus else host.total_mib() * 2**20
    kind = checkpointing_for(config, model, longest, total, total)
    return structs.replace(config, model=structs.replace(config.model, gradient_checkpointing=kind))


def resolve_on_rank(config: Config, path: str, device: str) -> Model:
    """Resolve "auto" for a rank on a `device`, before the model at `path` is loaded onto it. A collective.

    The rank with the least free memory decides. If the memory of a model is unknown, all activations are kept.
    """
    if config.model.gradient_checkpointing != "auto":
        return config.model
    kind, reason = _checkpointing_and_reason(config, path, *_free_and_total(device))
    if dist.get_rank() == 0 and (device != "cpu" or kind != "off"):
        log.info('model.gradient_checkpointing = "%s": %s', kind, reason)
    return structs.replace(config.model, gradient_checkpointing=kind)


def _checkpointing_and_reason(config: Config, path: str, free: int, total: int) -> tuple[Literal["off", "full"], str]:
    longest = longest_row(config)
    try:
        model = memory.sizes(read_settings(path), config.model)
    except ModelError as error:
        return "off", str(error)
    needed = memory.rank(config, model, longest).total
    there = f"{total / GIB:.1f} GiB in this machine"
    if gpus := config.learner.gpus:
        there = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free, and learner.gpus is {gpus:g}"
    numbers = f"about {needed / GIB:.1f} GiB with all activations kept, {there}"
    return checkpointing_for(config, model, longest, free, total), numbers


def _free_and_total(device: str) -> tuple[int, int]:
    machine = host.total_mib() * 2**20
    here = torch.tensor((machine, machine) if device == "cpu" else torch.cuda.mem_get_info(), device=device)
    dist.all_reduce(here, dist.ReduceOp.MIN)
    free, total = here.tolist()
    return free, total
