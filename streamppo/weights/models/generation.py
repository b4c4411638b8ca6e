"""The generation settings of a model, without what transformers refuses to read or to write.

transformers writes none that has a temperature and does not sample, as many published ones do; so it would be known
only when training is over.
"""

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
"""Settings that say which others mean something: they are taken first."""


class Generation(NamedTuple):
    """Settings that transformers writes and reads, and a sentence about each that is left out."""

    config: "GenerationConfig"
    notes: tuple[str, ...]


def read_settings(path: str | Path) -> Generation:
    """Read the generation settings of the model at `path`, as far as transformers takes them; never an error."""
    from transformers import GenerationConfig

    here = local_folder(path)
    file = None if here is None else here / FILE
    if file is None or not file.is_file():
        return Generation(GenerationConfig(), ())
    try:
        content: object = json.loads(durable.read(file))
    except (OSError, ValueError, RecursionError) as error:
        return Generation(GenerationConfig(), (f"{FILE} is left out: {error}",))
    if not isinstance(content, dict):
        return Generation(GenerationConfig(), (f"{FILE} is left out: it is no table of names",))
    return _drop_refused(cast("dict[str, object]", content))


def _drop_refused(wanted: Mapping[str, object]) -> Generation:
    """Take one setting after the other; leave out each that transformers refuses beside those before it.

    Example: `do_sample = false`, `temperature = 0.6`, `eos_token_id = 2` keeps the first and the third.
    """
    whole = _validate(wanted)
    if not isinstance(whole, str):
        return Generation(whole, ())
    kept: dict[str, object] = {}
    notes: list[str] = []
    for name in sorted(wanted, key=lambda name: name not in SWITCHES):
        made = _validate({**kept, name: wanted[name]})
        if isinstance(made, str):
            notes.append(f"{name} = {json.dumps(wanted[name])} of {FILE} is left out: transformers does not save it")
        else:
            kept[name] = wanted[name]
    made = _validate(kept)
    assert not isinstance(made, str), "each setting was taken beside those before"
    return Generation(made, tuple(notes))


def _validate(settings: Mapping[str, object]) -> "GenerationConfig | str":
    """Make settings of a table as transformers does, or say why it refuses to save them."""
    from transformers import GenerationConfig

    try:
        made = GenerationConfig.from_dict(dict(settings))
        made.validate(strict=True)
        json.loads(made.to_json_string())
    except REFUSALS as error:
        return str(error) or type(error).__name__
    return made
