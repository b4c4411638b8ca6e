"""Checkpoints by torch.distributed.checkpoint: written aside, flushed, renamed; complete only with their manifest."""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from streamppo.learner import manifest
from streamppo.learner.update import Updater


def save(folder: Path, version: int, updater: Updater, keep: int) -> None:
    """Write version `version` under `folder` and drop all but the newest `keep`. A collective."""
    final = folder / f"{version:08d}"
    aside = folder / f"{final.name}.tmp"
    if final.exists():
        return
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(updater), checkpoint_id=aside)
    if first:
        manifest.write(aside, version)
        aside.rename(final)
        manifest.flush(folder)
        for old in manifest.complete(folder)[:-keep]:
            shutil.rmtree(old)


def load(path: Path, updater: Updater) -> int:
    """Verify and load one checkpoint in place; returns its version. A collective.

    Raises `CheckpointError` that names the damaged file.
    """
    version = manifest.verify(path)
    state = _state(updater)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        updater.policy, updater.optimizer, model_state_dict=state["policy"], optim_state_dict=state["optimizer"]
    )
    updater.load_state_dict(state["updater"])
    return version


def _state(updater: Updater) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(updater.policy, updater.optimizer)
    return {"policy": model_state, "optimizer": optimizer_state, "updater": updater.state_dict()}
