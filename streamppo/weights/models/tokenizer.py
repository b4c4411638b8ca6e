"""Saves a model's tokenizer, or copies the original files if the saved ones would give another tokenizer."""

import base64
import json
import logging
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from streamppo import durable
from streamppo.weights.models.settings import REFUSALS, local_folder, naming

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "spiece.model", "sentencepiece*", "*.tiktoken", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates"),
)
PROCESSOR_TEMPLATE = "chat_template.json"
PROCESSOR = ("*processor_config.json", PROCESSOR_TEMPLATE)
"""Name patterns of a multimodal model's files for pictures and sounds."""
PIECES, FAST, TEKKEN = "tokenizer.model", "tokenizer.json", "tekken.json"
ASCII = (*b"\t\n", *range(32, 127))
"""Bytes that are each a character and, in tekken.json, a token."""
PROBE = "  1 + 1 = 2,\n\tnaïve façade: 東京 ½ 🙂  "
"""A text that tokenizers with different rules split differently."""

log = logging.getLogger(__name__)


def load(path: str | Path) -> "PreTrainedTokenizerBase":
    """Read the tokenizer of the model at `path`. Raises `ModelError`."""
    with naming(path):
        return read(path)


def read(path: str | Path) -> "PreTrainedTokenizerBase":
    """Read the tokenizer at `path`. Raises ValueError if that fails, or if transformers reads wrong tokens."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    # Different damage raises different errors, and the library `tokenizers` raises Exception itself.
    except Exception as error:
        raise ValueError(_reason(Path(path), error)) from error
    _compare_tekken(tokenizer, Path(path))
    tokenizer = _with_rules_of_file(tokenizer, path)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processor_template(path)
    return tokenizer


def _with_rules_of_file(tokenizer: "PreTrainedTokenizerBase", path: str | Path) -> "PreTrainedTokenizerBase":
    """Return `tokenizer`, or one with tokenizer.json's rules if only these rules keep the characters of a text.

    Transformers 5 replaces the rules by those of the class that tokenizer_config.json names. For DeepSeek R1's Llamas
    this class belongs to another family, whose rules drop all spaces.
    """
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or _keeps_characters(tokenizer):
        return tokenizer
    try:
        of_file = PreTrainedTokenizerFast.from_pretrained(str(path))
    except REFUSALS as error:
        log.debug("%s: there is no tokenizer.json that can be read: %s", path, error)
        return tokenizer
    return of_file if _keeps_characters(of_file) else tokenizer


def _keeps_characters(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return True if the text of the probe's tokens is the probe. SentencePiece may add or drop spaces at its ends."""
    backend = tokenizer.backend_tokenizer
    return backend.decode(backend.encode(PROBE, add_special_tokens=False).ids).strip() == PROBE.strip()


def _processor_template(path: str | Path) -> str | None:
    """Return the chat template in the file of a multimodal model's processor, which AutoTokenizer does not read."""
    from transformers.utils import cached_file

    lenient = ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors")
    file = cached_file(str(path), PROCESSOR_TEMPLATE, **dict.fromkeys(lenient, False))
    if file is None:
        return None
    try:
        return str(json.loads(durable.read(Path(file)))["chat_template"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{PROCESSOR_TEMPLATE} is damaged: {type(error).__name__}: {error}") from error


def _reason(folder: Path, error: Exception) -> str:
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return "it needs code that comes with it (auto_map in tokenizer_config.json), which streamppo does not run"
    files = (file for pattern in FILES for file in sorted(folder.glob(pattern)) if file.is_file())
    if (pointer := next(filter(durable.is_pointer, files), None)) is not None:
        return f"{pointer.name}: {durable.POINTER}"
    is_pieces = (folder / PIECES).is_file() and not (folder / FAST).is_file()
    if is_pieces and find_spec("sentencepiece") is None:
        return f"it has {PIECES} and no {FAST}, and needs the library sentencepiece: pip install sentencepiece protobuf"
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if _is_tekken(folder):
        return f"{_transformers()} cannot read its {TEKKEN} ({reason}); add the model's {FAST}"
    return reason


def _is_tekken(folder: Path) -> bool:
    """Return True if Mistral's tekken.json is the only file of a tokenizer."""
    return (folder / TEKKEN).is_file() and not (folder / FAST).is_file() and not (folder / PIECES).is_file()


def _transformers() -> str:
    from transformers import __version__

    return f"transformers {__version__}"


def _compare_tekken(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Raise ValueError if `tokenizer` and its only file, Mistral's tekken.json, disagree on the ids of single bytes.

    Some releases of transformers do not count the special tokens, whose ids come first.
    """
    if not _is_tekken(folder):
        return
    try:
        content = json.loads(durable.read(folder / TEKKEN))
        special = int(content["config"]["default_num_special_tokens"])
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in content["vocab"]}
        expected = {chr(byte): special + ranks[bytes([byte])] for byte in ASCII}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{TEKKEN} is damaged: {type(error).__name__}: {error}") from error
    wrong = [text for text, number in expected.items() if tokenizer.encode(text, add_special_tokens=False) != [number]]
    if wrong:
        raise ValueError(
            f"{_transformers()} reads its {TEKKEN} wrongly: {wrong[0]!r} is not the token "
            f"{expected[wrong[0]]}; add the model's {FAST}, or install a later transformers"
        )


def write(tokenizer: "PreTrainedTokenizerBase", start: str | Path | None, folder: Path) -> str:
    """Write `tokenizer` to `folder`; return a sentence if the files at `start` are copied instead. Raises `OSError`."""
    tokenizer.init_kwargs.pop("auto_map", None)
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
    """Replace the tokenizer's files in `folder` by those of the model at `start`. Raises `OSError`."""
    source = local_folder(start)
    for pattern in FILES:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in source.glob(pattern) if source else ():
            take = shutil.copytree if path.is_dir() else shutil.copyfile
            take(path, folder / path.name)
    return f"the tokenizer's files are copied as they are: {why}"


def copy_processor(start: str | Path, folder: Path) -> None:
    """Copy the processor's files of the model at `start` to `folder`. Raises `OSError` if it cannot."""
    source = local_folder(start)
    for pattern in PROCESSOR:
        for path in source.glob(pattern) if source else ():
            shutil.copyfile(path, folder / path.name)


def _difference(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> str:
    reread = read(folder)
    if reread.chat_template != tokenizer.chat_template:
        return "transformers saves another chat template"
    if reread(PROBE)["input_ids"] != tokenizer(PROBE)["input_ids"]:
        return "the files that transformers saves give other tokens for a text"
    return ""
