"""Exports the weights of a checkpoint as a folder for transformers, without Ray, engines or the journal."""

from pathlib import Path

from streamppo import durable
from streamppo.commands.console import echo
from streamppo.commands.models import weights
from streamppo.config.sections import Config, model_path
from streamppo.errors import CheckpointError, ConfigError
from streamppo.learner.model import adapters, hf_files


def export(config: Config, run: Path, version: int | None, folder: Path, *, adapter: bool) -> int:
    """Write the policy of `version`, by default the newest checkpoint, and its tokenizer at `folder`.

    With `adapter` only its adapters, in peft's format. Raises `ConfigError` if it has none, `CheckpointError` if
    `folder` or its temporary name exists, and as `weights.checkpoint_weights` does.
    """
    lora, start = config.model.lora, model_path(config, run)
    if adapter and lora is None:
        raise ConfigError(f"{run} has no adapters: it was trained without model.lora")
    if folder.exists():
        raise CheckpointError(f"{folder}: exists; name a folder that does not")
    durable.refuse_aside(folder, CheckpointError)
    policy = weights.checkpoint_weights(config, run, version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if adapter and lora is not None:
        adapters.write(policy.adapters, lora, start, folder)
    else:
        for note in hf_files.export(policy.tensors, start, folder, config.model.dtype):
            echo(f"{folder}: {note}")
    echo(f"{folder}: version {policy.version}, weights {policy.digest[:16]}")
    return 0
