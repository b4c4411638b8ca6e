"""Reads a model's generation settings, without those that transformers refuses to read, or to write after training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from streamppo import durable
from streamppo.weights.models.settings import REFUSALS, local_folder

if TYPE_CHECKING:
    from transformers import GenerationConfig

FILE = "generation_config.json"
SWITCHES = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")
"""Settings that decide whether other settings apply; these are validated first."""


class Generation(NamedTuple):
    """The accepted settings, and a sentence about each setting that is left out."""

    config: "GenerationConfig"
    notes: tuple[str, ...]


def read_settings(path: str | Path) -> Generation:
    """Read the generation settings at `path` that transformers accepts. Invalid settings raise no error."""
    from transformers import GenerationConfig

    folder = local_folder(path)
    file = None if folder is None else folder / FILE
    if file is None or not file.is_file():
        return Generation(GenerationConfig(), ())
    try:
        content: object = json.loads(durable.read(file))
    except (OSError, ValueError, RecursionError) as error:
        return Generation(GenerationConfig(), (f"{FILE} is left out: {error}",))
    if not isinstance(content, dict):
        return Generation(GenerationConfig(), (f"{FILE} is left out: it is not a table of names",))
    return _drop_refused(cast("dict[str, object]", content))


def _drop_refused(settings: Mapping[str, object]) -> Generation:
    """Drop the settings that transformers refuses, tested one by one together with the accepted settings."""
    validated_all = _validate(settings)
    if not isinstance(validated_all, str):
        return Generation(validated_all, ())
    accepted: dict[str, object] = {}
    notes: list[str] = []
    for name in sorted(settings, key=lambda name: name not in SWITCHES):
        validated = _validate({**accepted, name: settings[name]})
        if isinstance(validated, str):
            notes.append(f"{name} = {json.dumps(settings[name])} of {FILE} is left out: transformers does not save it")
        else:
            accepted[name] = settings[name]
    validated = _validate(accepted)
    assert not isinstance(validated, str), "each setting was accepted together with those before"
    return Generation(validated, tuple(notes))


def _validate(settings: Mapping[str, object]) -> "GenerationConfig | str":
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_dict(dict(settings))
        config.validate(strict=True)
        json.loads(config.to_json_string())
    except REFUSALS as error:
        return str(error) or type(error).__name__
    return config
