"""Get the weights of a checkpoint out, as a folder that transformers loads; without Ray, engines or the journal."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from streamppo.commands.echo import echo
from streamppo.config.sections import Config, model_path
from streamppo.errors import CheckpointError
from streamppo.learner import manifest, pretrained
from streamppo.weights import buckets


def export(config: Config, run: Path, version: int | None, folder: Path) -> int:
    """Write the policy of `version`, by default the newest checkpoint, and its tokenizer at `folder`.

    Raises `CheckpointError` if `folder` exists, if there is no such checkpoint, if files of it are on other disks, or
    if its weights are not those that were pushed; `ModelError` if the run's first model, whose settings and tokenizer
    go along, is not there.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists; name a folder that does not")
    path = _checkpoint(run, version)
    state, start = manifest.verify_whole(path), model_path(config, run)
    weights = _weights(path, start, config.model.dtype)
    push, _ = buckets.flatten(state.version, None, weights, config.learner.bucket_bytes)
    if push.digest != state.digest:
        raise CheckpointError(f"{path}: its weights are not those of version {state.version} that the engines had")
    folder.parent.mkdir(parents=True, exist_ok=True)
    pretrained.export(weights, start, folder, config.model.dtype)
    echo(f"{folder}: version {state.version}, weights {push.digest[:16]}")
    return 0


def _checkpoint(run: Path, version: int | None) -> Path:
    found = {int(path.name): path for path in manifest.complete(run / "checkpoints")}
    wanted = max(found, default=0) if version is None else version
    if wanted not in found:
        there = ", ".join(map(str, found)) or "none"
        asked = "" if version is None else f" of version {version}"
        raise CheckpointError(f"{run}: no checkpoint{asked}; there are {there}")
    return found[wanted]


def _weights(path: Path, start: str, dtype: str) -> dict[str, Tensor]:
    """The policy in a checkpoint, by its Hugging Face names in their order and in `dtype`, however many ranks wrote it.

    Tied weights appear once, under the name that `named_parameters` gives them.
    """
    with torch.device("meta"):
        lm = pretrained.read(start, "eager", weights=False)
    names = [(name, tuple(parameter.shape)) for name, parameter in lm.named_parameters()]
    # The optimizer's state and the critic's weights, which nobody asked for, are not read.
    state: dict[str, dict[str, Tensor]] = {"policy": {f"lm.{name}": torch.empty(shape) for name, shape in names}}
    try:
        with warnings.catch_warnings():
            # It warns of what is asked for here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, checkpoint_id=path, no_dist=True)
    except dcp.api.CheckpointException as error:
        reasons = [str(failure) for failure, _ in error.failures.values()]
        raise CheckpointError(f"{path}: does not hold the weights of {start}: {reasons[0]}") from error
    return {name: state["policy"][f"lm.{name}"].to(getattr(torch, dtype)) for name, _ in names}
