"""Get the weights of a checkpoint out, as a folder that transformers loads; without Ray, engines or the journal."""

from pathlib import Path

from streamppo.commands import weights
from streamppo.commands.echo import echo
from streamppo.config.sections import Config, model_path
from streamppo.errors import CheckpointError
from streamppo.learner import pretrained


def export(config: Config, run: Path, version: int | None, folder: Path) -> int:
    """Write the policy of `version`, by default the newest checkpoint, and its tokenizer at `folder`.

    Raises `CheckpointError` if `folder` exists, and as `weights.of_checkpoint` does.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists; name a folder that does not")
    found = weights.of_checkpoint(config, run, version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    pretrained.export(found.tensors, model_path(config, run), folder, config.model.dtype)
    echo(f"{folder}: version {found.version}, weights {found.digest[:16]}")
    return 0
