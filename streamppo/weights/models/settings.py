"""A model's configuration as transformers reads it, and whether its head is its embedding.

    config.json ties   in the files               the head is
    yes                one of both                the embedding
    yes                both, of equal values      the embedding
    yes                both, of other values      a weight of its own, as transformers decides when it loads them
    no                 both                       a weight of its own
    no                 the embedding alone        missing: an error (`checkpoint.py`)

In the fourth case the configuration that everything here gets, and that an export has, says `tie_word_embeddings =
false`: SGLang, which goes by the configuration alone, then has the same model.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from streamppo import durable
from streamppo.errors import ModelError
from streamppo.weights.models import folder, headers
from streamppo.weights.models.headers import Header

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

REFUSALS = (
    *(OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(RuntimeError, ImportError, AssertionError, SafetensorError, StrictDataclassError),
)
"""Exceptions by which transformers and torch refuse a model: of its author's mistakes every kind."""
UNKNOWN_TYPE = re.compile(r"model type `([^`]+)`")
"""transformers' words of a type that it does not have."""
CHUNK = 1 << 26
"""Bytes of two tensors that are compared at a time."""


def settings(path: str | Path, *, untied: bool = False) -> "PretrainedConfig":
    """Read the configuration of the model at `path`, a folder or a name on the hub.

    Its head is no embedding if its files say so, as far as they are on this machine, or if it is `untied`.
    Raises `ModelError` if there is none, or if it is of quantised weights or of code that comes with the model.
    """
    config = read_settings(path)
    if is_tied(config) and (untied or heads_differ(path, config)):
        untie(config)
    return config


def read_settings(path: str | Path) -> "PretrainedConfig":
    """Read the configuration of the model at `path` as it is written, whatever its files hold. Raises as `settings`."""
    from transformers import AutoConfig

    if Path(path).is_dir():
        folder.kind(Path(path))
    with naming(path):
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    folder.refuse_quantised(path, config.to_dict())
    return config


@contextmanager
def naming(path: str | Path) -> Generator[None]:
    """Raise what transformers and torch say of the model at `path` as a `ModelError`."""
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

        named = UNKNOWN_TYPE.search(text)
        kind = f"model_type {named[1]!r}" if named else "a model_type"
        return (
            f"the model {str(path)!r} is of {kind} that the installed transformers ({__version__}) does not know: "
            "name a model of a family that it has, or install a release that has this one"
        )
    if isinstance(error, OSError | ValueError | ImportError | SafetensorError):
        return f"the model {str(path)!r} cannot be loaded: {text}"
    return f"the model {str(path)!r} cannot be loaded with its config.json: {type(error).__name__}: {text}"


# --- ties ----------------------------------------------------------------------------------------------------


def is_tied(config: "PretrainedConfig") -> bool:
    """Tell if a configuration says that the head is the embedding."""
    return any(getattr(one, "tie_word_embeddings", False) for one in (config, config.get_text_config()))


def untie(config: "PretrainedConfig") -> None:
    """Let the head be a weight of its own."""
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False


def as_pushed(config: "PretrainedConfig", names: Iterable[str]) -> "PretrainedConfig":
    """Let the head be a weight of its own if a version with tensors of these `names` has it; changes `config`."""
    tied, have = dict(pairs(config)), set(names)
    if is_tied(config) and tied.keys() & have:
        untie(config)
    return config


def pairs(config: "PretrainedConfig") -> Iterator[tuple[str, str]]:
    """Name each head of a causal LM that may be an embedding, and the embedding."""
    tied: object = getattr(_causal(config), "_tied_weights_keys", None)
    if isinstance(tied, Mapping):
        yield from ((str(head), str(embedding)) for head, embedding in tied.items())


def heads_differ(path: str | Path, config: "PretrainedConfig") -> bool:
    """Tell if the files at `path`, as far as they are here, have a head and an embedding of other values.

    Raises `ModelError` for a model that has several heads, of which some differ.
    """
    here = local_folder(path)
    if here is None:
        return False
    prefix: str = getattr(_causal(config), "base_model_prefix", "")
    try:
        found = headers.folder_headers(here)
    except ModelError:
        # Of files that are missing or damaged, whoever loads them says more.
        return False
    if found is None:
        return _pickles_differ(here, config, prefix)
    both = [(_named(head, found, prefix), _named(embedding, found, prefix)) for head, embedding in pairs(config)]
    differ = {not same(one, other) for one, other in both if one is not None and other is not None}
    if len(differ) > 1:
        raise ModelError(f"the model {str(path)!r} has several heads, and only some of them are its embedding")
    return True in differ


def local_folder(path: str | Path) -> Path | None:
    """Find the folder of a model whose files are on this machine, in the hub's cache too."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (OSError, ValueError):
        return None


def _causal(config: "PretrainedConfig") -> "type[PreTrainedModel] | None":
    from transformers import AutoModelForCausalLM

    known: Mapping[type, type[PreTrainedModel]] = AutoModelForCausalLM._model_mapping  # pyright: ignore
    # It makes the class at the look.
    return known[type(config)] if type(config) in known else None  # noqa: SIM401


def _named(name: str, found: Mapping[str, Header], prefix: str) -> Header | None:
    """A parameter in the files of a causal LM, which may name it without the prefix of its body."""
    return found.get(name) or found.get(name.removeprefix(f"{prefix}."))


def same(one: Header, other: Header) -> bool:
    """Tell if two tensors of files have equal values, without torch; the first difference ends the look."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    width = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}.get(one.dtype, np.uint8)
    with durable.reading(one.file) as left, durable.reading(other.file) as right:
        left.seek(one.begin)
        right.seek(other.begin)
        for at in range(one.begin, one.end, CHUNK):
            size = min(CHUNK, one.end - at)
            first, second = (np.frombuffer(file.read(size), width) for file in (left, right))
            # A zero equals a zero of the other sign.
            zeros = np.left_shift(np.bitwise_or(first, second), 1) == 0
            if not np.array_equal(first, second) and not ((first == second) | zeros).all():
                return False
    return True


def _pickles_differ(here: Path, config: "PretrainedConfig", prefix: str) -> bool:
    found = headers.pickle_tensors(here)
    for head, embedding in pairs(config):
        one, other = (found.get(name, found.get(name.removeprefix(f"{prefix}."))) for name in (head, embedding))
        if one is not None and other is not None and not one.equal(other):
            return True
    return False
