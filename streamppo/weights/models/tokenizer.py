"""Saves a model's tokenizer; if reading it back gives another tokenizer, copies the model's original files instead."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from streamppo.weights.models.settings import REFUSALS, local_folder, naming

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "spiece.model", "sentencepiece*", "*.tiktoken", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates"),
)
"""Name patterns of a tokenizer's files."""
PROBE = "  1 + 1 = 2,\n\tnaïve façade: 東京 ½ 🙂  "
"""A text that tokenizers with different rules split differently."""


def load(path: str | Path) -> "PreTrainedTokenizerBase":
    """Read the tokenizer of the model at `path`. Raises `ModelError`."""
    with naming(path):
        return read(path)


def read(path: str | Path) -> "PreTrainedTokenizerBase":
    """Read the tokenizer of the model at `path`. Raises ValueError, with the reason, for files that cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    # Each damaged file raises another error, and the library `tokenizers` raises Exception itself.
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def write(tokenizer: "PreTrainedTokenizerBase", start: str | Path | None, folder: Path) -> str:
    """Write the `tokenizer` of the model at `start` into `folder`; returns a sentence if its files are copied instead.

    A tokenizer without a `start` is new and has no files to copy. Raises `OSError` if the disk refuses.
    """
    if start is None:
        tokenizer.save_pretrained(folder)
        return ""
    try:
        tokenizer.save_pretrained(folder)
        if (why := _difference(tokenizer, folder)) == "":
            return ""
    except OSError:
        raise
    except REFUSALS as error:
        why = f"transformers does not save it: {' '.join(str(error).split()) or type(error).__name__}"
    return copy(start, folder, why)


def copy(start: str | Path, folder: Path, why: str) -> str:
    """Replace the tokenizer's files in `folder` by those of the model at `start`; returns a sentence with `why`.

    Raises `OSError` if the disk refuses.
    """
    source = local_folder(start)
    for pattern in FILES:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in source.glob(pattern) if source else ():
            take = shutil.copytree if path.is_dir() else shutil.copyfile
            take(path, folder / path.name)
    return f"the tokenizer's files are copied as they are: {why}"


def _difference(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> str:
    again = read(folder)
    if again.chat_template != tokenizer.chat_template:
        return "transformers saves another chat template"
    if again(PROBE)["input_ids"] != tokenizer(PROBE)["input_ids"]:
        return "what transformers saves makes other tokens of a text"
    return ""
