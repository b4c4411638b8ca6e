"""Reads size, context and tokenizer of a user's model, or guesses them from its name if it is not on this machine."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

from streamppo import durable
from streamppo.commands.checks import folder as folders
from streamppo.commands.start.project.rows import PromptView
from streamppo.config.model import BUILTIN
from streamppo.errors import ConfigError, ModelError, TaskError
from streamppo.tasks import warmup_data
from streamppo.weights.models import folder as model_folder
from streamppo.weights.models import headers

UNKNOWN_CONTEXT = 4096
"""Assumed number of positions of a model that is not on this machine."""
UNKNOWN_PARAMETERS = 1_000_000_000
CHARACTERS = 3
"""Assumed characters of a token if there is no tokenizer: a low guess."""
TINY_PARAMETERS = 90_000
FLOAT32 = 4


class PolicyModel(NamedTuple):
    """The model at `path`. `cache` is the bytes of a token in an engine's cache, None if unknown.

    `chat` is True if the tokenizer has a chat template. If `folder` is None, the other fields are guessed.
    """

    path: str
    folder: str | None
    parameters: int
    context: int
    cache: int | None
    chat: bool

    @property
    def is_known(self) -> bool:
        return self.folder is not None or self.path == BUILTIN

    @property
    def size(self) -> str:
        """The number of parameters in words. That of "builtin:tiny" grows with the number of different characters."""
        return f"{'about ' if self.folder is None else ''}{self.parameters:,} parameters"

    def view(self) -> PromptView:
        """Return how the model sees prompts. Raises `ConfigError` if the tokenizer cannot be loaded."""
        if self.path == BUILTIN:
            return PromptView(lambda prompt: len(warmup_data.Characters().ids(prompt)))
        if self.folder is None:
            return PromptView(lambda prompt: -(-len(prompt.text) // CHARACTERS), chat=self.chat)
        from streamppo.tasks.tokenizer import Tokenizer

        try:
            tokenizer = Tokenizer(self.folder)
        except TaskError as error:
            raise ConfigError(str(error)) from error
        return PromptView(
            lambda prompt: len(tokenizer.ids(prompt)),
            lambda prompt: tokenizer.find_control_token(prompt) is not None,
            chat=self.chat,
        )


def read(path: str) -> PolicyModel:
    """Read the model at `path`. Raises `ConfigError` if there is no model."""
    if path == BUILTIN:
        return PolicyModel(path, None, TINY_PARAMETERS, warmup_data.CONTEXT, None, chat=False)
    folder, finding = folders.find(path, "model")
    if folder is None and folders.looks_like_path(path):
        raise ConfigError(f"--model: {finding.text}")
    if folder is None:
        is_chat = re.search(r"instruct|chat|(?<![a-z])it(?![a-z])", path.lower()) is not None
        return PolicyModel(path, None, _size_by_name(path), UNKNOWN_CONTEXT, None, chat=is_chat)
    settings = _settings(Path(folder))
    return PolicyModel(
        path,
        folder,
        _parameters(Path(folder)),
        int(cast(int, settings.get("max_position_embeddings") or UNKNOWN_CONTEXT)),
        _cache(settings),
        chat=_has_template(Path(folder)),
    )


def _settings(folder: Path) -> Mapping[str, object]:
    """Return the entries of config.json. Entries of a "text_config", the language model's, replace the others."""
    try:
        entries = model_folder.kind(folder)
    except ModelError as error:
        raise ConfigError(f"--model: {error}") from error
    text = entries.get("text_config")
    return {**entries, **cast("dict[str, object]", text)} if isinstance(text, dict) else entries


def _parameters(folder: Path) -> int:
    try:
        stored, files = headers.folder_headers(folder), headers.weight_files(folder)
    except ModelError:
        # A damaged file is reported by `check`.
        return UNKNOWN_PARAMETERS
    if stored is None:
        return sum(path.stat().st_size for path in files) // 2
    return sum(math.prod(header.shape) for header in stored.values()) or UNKNOWN_PARAMETERS


def _cache(settings: Mapping[str, object]) -> int | None:
    """Return the bytes of a token's keys and values in float32, for a model of llama's structure."""
    try:
        heads = int(cast(int, settings["num_attention_heads"]))
        width = settings.get("head_dim") or int(cast(int, settings["hidden_size"])) // heads
        pairs = 2 * int(cast(int, settings.get("num_key_value_heads") or heads)) * int(cast(int, width))
        return FLOAT32 * pairs * int(cast(int, settings["num_hidden_layers"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _has_template(folder: Path) -> bool:
    # Tokenizers do not read chat_template.json, which belongs to a processor.
    if (folder / "chat_template.jinja").is_file() or any((folder / "additional_chat_templates").glob("*.jinja")):
        return True
    try:
        return bool(json.loads(durable.read(folder / "tokenizer_config.json")).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _size_by_name(path: str) -> int:
    """Return the number of parameters in a model's name. Example: Qwen2.5-0.5B -> 500,000,000."""
    units = {"b": 10**9, "m": 10**6}
    sizes = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", path.lower())
    return int(float(sizes[-1][0]) * units[sizes[-1][1]]) if sizes else UNKNOWN_PARAMETERS
