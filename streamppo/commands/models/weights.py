"""Reads and exports the policy's weights in a checkpoint of a run, without Ray or engines."""

from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from streamppo import durable
from streamppo.commands.console import echo
from streamppo.config.model import Model
from streamppo.config.sections import Config, model_path
from streamppo.errors import CheckpointError, ConfigError, JournalError
from streamppo.learner.checkpoint import distcp, history, manifest, remote
from streamppo.learner.checkpoint.history import History
from streamppo.learner.checkpoint.manifest import Fetch
from streamppo.learner.model import adapters, hf_files
from streamppo.weights import buckets
from streamppo.weights.adapters import merge_adapters
from streamppo.weights.buckets import Shard
from streamppo.weights.models import loading


class Weights(NamedTuple):
    """A version: its digest, its tensors by their Hugging Face names, and the `adapters` that were merged into them."""

    version: int
    digest: str
    tensors: dict[str, Tensor]
    adapters: dict[str, Tensor]


def export(config: Config, run: Path, version: int | None, folder: Path, *, adapter: bool) -> int:
    """Write the policy of `version`, by default of the newest checkpoint, and its tokenizer to `folder`.

    With `adapter`, writes only the adapters in peft's format. Raises `ConfigError` if there are no adapters,
    `CheckpointError` if `folder` or its temporary name exists, and the errors of `checkpoint_weights`.
    """
    lora, start = config.model.lora, model_path(config, run)
    if adapter and lora is None:
        raise ConfigError(f"{run} has no adapters: it was trained without model.lora")
    if folder.exists():
        raise CheckpointError(f"{folder}: already exists; name a new folder")
    durable.refuse_aside(folder, CheckpointError)
    policy = checkpoint_weights(config, run, version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if adapter and lora is not None:
        adapters.write(policy.adapters, lora, start, folder)
    else:
        for note in hf_files.export(policy.tensors, start, folder, config.model.dtype):
            echo(f"{folder}: {note}")
    echo(f"{folder}: version {policy.version}, weights {policy.digest[:16]}")
    return 0


def checkpoint_weights(config: Config, run: Path, version: int | None) -> Weights:
    """Read the policy of `version`, by default of the newest checkpoint.

    If a run in progress deletes the newest checkpoint during the read, it is chosen again. Missing and damaged files
    are fetched from checkpoint.remote if it is set. Raises `CheckpointError` if the checkpoint does not exist, if its
    files are on other disks, or if its digest is not the journal's, and `ModelError` if the run's first model is
    missing.
    """
    while True:
        past = _run_history(config, run)
        path = _checkpoint(run, version, past)
        was_whole = (path / manifest.MANIFEST).exists()
        try:
            return weights_in(path, config, model_path(config, run), past, remote.fetcher(run))
        except (CheckpointError, OSError) as error:
            if not was_whole or (path / manifest.MANIFEST).exists():
                raise
            if version is not None:
                raise CheckpointError(
                    f"{path}: the run deleted it meanwhile: it keeps the newest {config.checkpoint.keep} "
                    "(checkpoint.keep); name a newer version"
                ) from error


def weights_in(
    path: Path, config: Config, start: str, past: History | None = None, fetch: Fetch | None = None
) -> Weights:
    """Read the policy of the checkpoint at `path`. The run began with the model `start`.

    `fetch` gets files that are missing or damaged. Raises the errors of `checkpoint_weights`.
    """
    state, model = manifest.verify_whole(path, past, fetch), config.model
    tensors = _read(path, start, model)
    frozen = {} if model.lora is None else model_weights(start, model.dtype)
    push, _ = buckets.pack_whole(state.version, tensors, config.learner.bucket_bytes)
    described = (buckets.describe_tensor(name, Shard.whole(tensor), tensor) for name, tensor in frozen.items())
    push = structs.replace(push, frozen=tuple(described))
    if push.digest != state.digest:
        raise CheckpointError(f"{path}: its weights differ from version {state.version} as it was pushed")
    if model.lora is None:
        return Weights(state.version, push.digest, tensors, {})
    return Weights(state.version, push.digest, merge_adapters(frozen, tensors, model.lora.scale), tensors)


def model_weights(path: str, dtype: str) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face model by name, in `dtype`. Raises `ModelError`."""
    lm = hf_files.read(path, "eager")
    return {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in lm.named_parameters()}


def untrained_weights(path: str, dtype: str) -> dict[str, Tensor]:
    """Return the tensors of the model at `path` that training leaves unchanged, by name, in `dtype`.

    These are parameters that transformers freezes, stored buffers, and the parts of a multimodal model outside its text
    model. Raises `ModelError`.
    """
    with torch.device("meta"):
        text_model = loading.empty(path, attention="eager")
        names = loading.empty(path, attention="eager", whole=True).state_dict().keys()
    named = text_model.named_parameters(remove_duplicate=False)
    untrained = names - {name for name, parameter in named if parameter.requires_grad}
    if not untrained:
        return {}
    tensors: dict[str, Tensor] = loading.load(path, whole=True).model.state_dict()
    target = getattr(torch, dtype)
    return {
        name: tensor.to(target) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
        if name in untrained
    }


def _run_history(config: Config, run: Path) -> History | None:
    try:
        return history.read_history(run, config)
    except JournalError as error:
        echo(f"{error}: the weights are compared only with their checkpoint")
        return None


def _checkpoint(run: Path, version: int | None, past: History | None) -> Path:
    """Return the checkpoint of `version`, by default the newest that belongs to `past` or, if none does, the newest."""
    folder, address = run / "checkpoints", remote.known_address(run)
    checkpoints = {int(path.name): path for path in manifest.complete(folder)}
    whole = [number for number in checkpoints if version is None and manifest.is_of(checkpoints[number], past)]
    wanted = max(whole or checkpoints, default=None) if version is None else version
    if address and wanted not in checkpoints:
        copies = remote.CheckpointStore(address).versions(past)
        wanted = max(copies, default=None) if wanted is None else wanted
        checkpoints |= {number: folder / f"{number:08d}" for number in copies if number not in checkpoints}
        # If only some files are missing, they are fetched when the checkpoint is verified.
        if wanted in checkpoints and not checkpoints[wanted].exists():
            remote.CheckpointStore(address).fetch_checkpoint(checkpoints[wanted])
    if wanted not in checkpoints:
        if not checkpoints:
            raise CheckpointError(f"{run}: no checkpoint yet: a run saves them every `checkpoint.every` updates")
        present = ", ".join(map(str, checkpoints))
        raise CheckpointError(f"{run}: no checkpoint of version {version}; there are {present}")
    return checkpoints[wanted]


def _read(path: Path, start: str, model: Model) -> dict[str, Tensor]:
    """Return the policy's pushed parameters in the model's `dtype`. Any number of ranks may have saved the checkpoint.

    A checkpoint has only the trained parameters; those that transformers freezes are read from `start`. Names and order
    are those of a push.
    """
    with torch.device("meta"):
        lm = hf_files.read(start, "eager", weights=False)
        if model.lora is not None:
            adapters.add(lm, model.lora, model.dtype)
    parameters = dict(lm.named_parameters())
    names = [(name, tuple(parameter.shape)) for name, parameter in parameters.items() if parameter.requires_grad]
    # The optimizer's state and the critic's weights are not read.
    state: dict[str, dict[str, Tensor]] = {"policy": {f"lm.{name}": torch.empty(shape) for name, shape in names}}
    try:
        distcp.load(state, path, alone=True)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: does not fit the model {start}: {error}") from error
    dtype = getattr(torch, model.dtype)
    trained = {adapters.published_name(name): state["policy"][f"lm.{name}"].to(dtype) for name, _ in names}
    if model.lora is not None or len(trained) == len(parameters):
        return trained
    frozen = model_weights(start, model.dtype)
    return {name: trained.get(name, frozen[name]) for name in parameters}
