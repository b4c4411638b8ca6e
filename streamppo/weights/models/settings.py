"""Reads a model's configuration with transformers, and decides whether its head is tied to its embedding.

    config.json ties   in the files               the head is
    yes                one of both                the embedding
    yes                both, with equal values    the embedding
    yes                both, with other values    a separate weight, as transformers decides when it loads them
    no                 both                       a separate weight
    no                 only the embedding         missing: an error (fit.py)

In the third row, `settings` returns a configuration with `tie_word_embeddings = false`, because SGLang reads only this.
"""

import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from streamppo import durable
from streamppo.errors import ModelError
from streamppo.weights.models import folder, headers
from streamppo.weights.models.classes import causal_class
from streamppo.weights.models.headers import Header

if TYPE_CHECKING:
    from transformers import PretrainedConfig

REFUSALS = (
    *(OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(RuntimeError, ImportError, AssertionError, SafetensorError, StrictDataclassError),
)
"""Exceptions that transformers and torch raise for an invalid model. Different mistakes raise different exceptions."""
UNKNOWN_TYPE = re.compile(r"model type `([^`]+)`")
CHUNK = 1 << 26


def settings(path: str | Path, *, untied: bool = False) -> "PretrainedConfig":
    """Read the configuration of the model at `path`, a folder or a hub name.

    The head is untied if `untied` is true, or if the head in the local files differs from the embedding. Raises
    `ModelError` without a configuration, for quantised weights, or for a model with code.
    """
    config = read_settings(path)
    if is_tied(config) and (untied or heads_differ(path, config)):
        untie(config)
    return config


def read_settings(path: str | Path) -> "PretrainedConfig":
    """Read the configuration of the model at `path`, but no weights. Raises `ModelError` as `settings` does."""
    from transformers import AutoConfig

    if Path(path).is_dir():
        folder.kind(Path(path))
    with naming(path):
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    folder.refuse_quantised(path, config.to_dict())
    return config


@contextmanager
def naming(path: str | Path) -> Generator[None]:
    """Raise errors of transformers and torch in the block as a `ModelError` about the model at `path`."""
    try:
        yield
    except REFUSALS as error:
        raise ModelError(_sentence(path, error)) from error


def _sentence(path: str | Path, error: BaseException) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            f"the model {str(path)!r} needs code that comes with it (auto_map in its config.json or tokenizer), which "
            "streamppo does not run: name a model of a family that transformers has, or convert it to one"
        )
    if "does not recognize this architecture" in text:
        from transformers import __version__

        found_type = UNKNOWN_TYPE.search(text)
        kind = f"model_type {found_type[1]!r}" if found_type else "a model_type"
        return (
            f"the model {str(path)!r} is of {kind} that the installed transformers ({__version__}) lacks: "
            "name a model of a family that it has, or install a release that has this one"
        )
    if "Padding_idx" in text:
        return f"the model {str(path)!r} cannot be loaded: pad_token_id in its config.json is not below vocab_size"
    if isinstance(error, OSError | ValueError | ImportError | SafetensorError):
        return f"the model {str(path)!r} cannot be loaded: {text}"
    return f"the model {str(path)!r} cannot be loaded with its config.json: {type(error).__name__}: {text}"


def is_tied(config: "PretrainedConfig") -> bool:
    """Return whether a configuration ties the head to the embedding."""
    return any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))


def untie(config: "PretrainedConfig") -> None:
    """Make the head a separate weight in `config`."""
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False


def as_pushed(config: "PretrainedConfig", names: Iterable[str]) -> "PretrainedConfig":
    """Make the head a separate weight in `config` if `names`, the tensors of a version, include the head."""
    tied, have = dict(pairs(config)), set(names)
    if is_tied(config) and tied.keys() & have:
        untie(config)
    return config


def pairs(config: "PretrainedConfig") -> Iterator[tuple[str, str]]:
    """Yield the names (head, embedding) of each pair that a causal LM can tie."""
    tied: object = getattr(causal_class(config), "_tied_weights_keys", None)
    if isinstance(tied, Mapping):
        yield from ((str(head), str(embedding)) for head, embedding in tied.items())


def heads_differ(path: str | Path, config: "PretrainedConfig") -> bool:
    """Return whether local files have a head that differs from the embedding. Raises `ModelError` if only some do."""
    local = local_folder(path)
    if local is None:
        return False
    try:
        stored = headers.folder_headers(local)
    except ModelError:
        # The files are missing or damaged. Loading them raises a more precise error.
        return False
    if stored is None:
        tensors = headers.pickle_tensors(local)
        return not all(tensors[head].equal(tensors[embedding]) for head, embedding in pairs_in_files(config, tensors))
    differ = {not are_equal(stored[head], stored[embedding]) for head, embedding in pairs_in_files(config, stored)}
    if len(differ) > 1:
        raise ModelError(f"the model {str(path)!r} has several heads, and only some of them equal its embedding")
    return True in differ


def pairs_in_files(config: "PretrainedConfig", file_names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the names in the files of each pair (head, embedding) whose tensors are both in the files."""
    prefix: str = getattr(causal_class(config), "base_model_prefix", "")
    for head, embedding in pairs(config):
        of_head, of_embedding = (_in_files(name, file_names, prefix) for name in (head, embedding))
        if of_head is not None and of_embedding is not None:
            yield of_head, of_embedding


def local_folder(path: str | Path) -> Path | None:
    """Return the local folder of a model (for a hub name, in the hub's cache); None if it is not on this machine."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (OSError, ValueError):
        return None


def _in_files(name: str, file_names: Collection[str], prefix: str) -> str | None:
    """Return a parameter's name in the files of a causal LM; None if it is in no file.

    Files may omit the prefix of the transformer, and files of multimodal models have other prefixes. Example: the
    parameter `model.language_model.embed_tokens.weight` is `language_model.model.embed_tokens.weight` in the files of a
    Gemma 3.
    """
    for exact in (name, name.removeprefix(f"{prefix}.")):
        if exact in file_names:
            return exact
    end = "." + ".".join(name.split(".")[-2:])
    similar = [stored for stored in file_names if stored.endswith(end)]
    return similar[0] if len(similar) == 1 else None


def are_equal(first_header: Header, second_header: Header) -> bool:
    """Return whether two tensors in files have equal values. Needs no torch, and stops at the first difference."""
    if first_header.shape != second_header.shape or first_header.dtype != second_header.dtype:
        return False
    width = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}.get(first_header.dtype, np.uint8)
    with durable.reading(first_header.file) as first_file, durable.reading(second_header.file) as second_file:
        first_file.seek(first_header.begin)
        second_file.seek(second_header.begin)
        for offset in range(first_header.begin, first_header.end, CHUNK):
            size = min(CHUNK, first_header.end - offset)
            first, second = (np.frombuffer(file.read(size), width) for file in (first_file, second_file))
            # 0.0 equals -0.0.
            zeros = np.left_shift(np.bitwise_or(first, second), 1) == 0
            if not np.array_equal(first, second) and not ((first == second) | zeros).all():
                return False
    return True
