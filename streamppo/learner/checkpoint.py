"""Checkpoints by torch.distributed.checkpoint: written aside, flushed, renamed; complete only with their manifest."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from streamppo import durable
from streamppo.config import Checkpoint
from streamppo.errors import CheckpointError
from streamppo.learner import manifest
from streamppo.learner.manifest import State


def save(
    folder: Path, state: State, policy: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Checkpoint
) -> None:
    """Write a checkpoint under `folder`, and drop those that `config` does not keep. A collective.

    Raises `CheckpointError` if the disk refuses.
    """
    final = folder / f"{state.version:08d}"
    if final.exists():
        return
    first = dist.get_rank() == 0
    try:
        if first:
            shutil.rmtree(durable.aside(final), ignore_errors=True)
            durable.aside(final).mkdir(parents=True)
        dist.barrier()
        dcp.save(_tensors(policy, optimizer), checkpoint_id=durable.aside(final))
        if first:
            manifest.write(durable.aside(final), state)
            durable.settle(final)
            manifest.drop(folder, config.keep, config.keep_every)
    except (OSError, dcp.api.CheckpointException) as error:
        raise CheckpointError(f"{final}: cannot be written: {error}") from error


def load(path: Path, policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Load one verified checkpoint in place, RNG included. A collective.

    Raises `CheckpointError` if another number of ranks wrote it.
    """
    state = manifest.verify(path)
    if state.ranks != dist.get_world_size():
        raise CheckpointError(f"{path}: written by {state.ranks} ranks, and learner.ranks is {dist.get_world_size()}")
    tensors = _tensors(policy, optimizer)
    dcp.load(tensors, checkpoint_id=path)
    set_state_dict(policy, optimizer, model_state_dict=tensors["policy"], optim_state_dict=tensors["optimizer"])
    (rng,) = tensors["rng"].values()
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return state


def _tensors(policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    rng = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
    return {"policy": model_state, "optimizer": optimizer_state, "rng": {f"rank-{dist.get_rank()}": rng}}
