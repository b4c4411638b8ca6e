"""Loads a transformers model with all of its weights, and names weights that are missing from its files."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor

from streamppo.errors import ModelError
from streamppo.weights.models import classes, fit, generation, headers
from streamppo.weights.models.classes import Kind
from streamppo.weights.models.headers import Header
from streamppo.weights.models.settings import is_tied, naming, pairs, settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LoadedModel(NamedTuple):
    """A model in evaluation mode, and the names of parameters of a critic's head that are not in the files."""

    model: Any
    new: Collection[str] = ()


def load(
    path: str | Path,
    kind: Kind = "AutoModelForCausalLM",
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    body: bool = False,
    whole: bool = False,
) -> LoadedModel:
    """Load the model at `path`, a folder or a hub name, in `dtype`, with transformers' `attention` implementation.

    With `body`, only the transformer must be in the files. With `whole`, the parts outside the text model are loaded
    too. Raises `ModelError` for a tensor that is missing, unexpected, misshaped or not finite, and for everything that
    transformers refuses.
    """
    folder, config = fetch(path), settings(path)
    fit.check(folder, config, kind, body=body)
    options: dict[str, object] = {} if attention is None else {"attn_implementation": attention}
    with naming(path), fit.quiet():
        made: Any = classes.model_class(config, kind, whole=whole)
        model, info = made.from_pretrained(
            str(path),
            config=classes.fitting(made, config),
            dtype=dtype,
            output_loading_info=True,
            generation_config=generation.read_settings(path).config,
            **options,
        )
    classes.prepare(model)
    reported = fit.report(info)
    if not whole and classes.is_multimodal(config):
        # `fit.check` has compared the parts that are in the files and not in the text model.
        reported = reported._replace(unexpected=())
    if inside := reported.of_body(model.base_model_prefix, kind, body=body):
        fit.refuse(folder, config, inside, ())
    if kind == "AutoModelForCausalLM":
        _compare_ties(path, config, model)
    if name := fit.first_not_finite(dict(model.named_parameters())):
        raise ModelError(not_finite_message(path, name))
    return LoadedModel(model, reported.missing)


def empty(
    path: str | Path, kind: Kind = "AutoModelForCausalLM", *, attention: str, untied: bool = False, whole: bool = False
) -> Any:
    """Make the model at `path` with random weights; `untied`: its head is a separate weight. Raises `ModelError`."""
    config = settings(path, untied=untied)
    # transformers would warn that flash-attn needs 16-bit weights; the learner's passes compute in 16 bits.
    with naming(path), fit.quiet():
        options = {"dtype": torch.float32, "attn_implementation": attention}
        return classes.make(config, kind, whole=whole, **options).eval()


def stored_buffers(config: "PretrainedConfig") -> dict[str, Tensor]:
    """Read the buffers in the files of the model of `config`, which are neither trained nor pushed, in float32."""
    from transformers.core_model_loading import revert_weight_conversion

    path = config.name_or_path or ""
    with naming(path or config.model_type), torch.device("meta"):
        model = classes.make(config)
    tensors: dict[str, Tensor] = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = [name for name in tensors if name not in parameters]
    if not names:
        return {}
    in_files = {name: list(revert_weight_conversion(model, {name: tensors[name]})) for name in names}
    folder = fetch(path)
    stored = headers.folder_headers(folder)
    if stored is None or any(len(found) != 1 or found[0] not in stored for found in in_files.values()):
        # The files have other names, or are pickles: transformers reads them.
        buffers = dict(load(path).model.named_buffers())
        return {name: buffers[name] for name in names}
    return {name: _read(stored[file_name], file_name) for name, (file_name,) in in_files.items()}


def _read(header: Header, name: str) -> Tensor:
    with safe_open(header.file, framework="pt") as file:
        return file.get_tensor(name).float()


def not_finite_message(path: str | Path, name: str) -> str:
    """Return the error message about a tensor with a NaN or an infinity."""
    return f"the model {str(path)!r} has NaN or infinity in {name!r}: the run that trained it diverged"


def fetch(path: str | Path) -> Path:
    """Return the folder of a model. A model with a hub name is downloaded first. Raises `ModelError`."""
    if Path(path).is_dir():
        return Path(path)
    from transformers.utils import cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    with naming(path):
        config = cast("str", cached_file(str(path), "config.json"))
        lenient: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
        cached_file(str(path), generation.FILE, **lenient)
        for single, index in ((headers.SINGLE, headers.INDEX), (headers.PICKLE, headers.PICKLE_INDEX)):
            if cached_file(str(path), single, **lenient):
                break
            if cached := cached_file(str(path), index, **lenient):
                get_checkpoint_shard_files(str(path), cached)
                break
    return Path(config).parent


def _compare_ties(path: str | Path, config: "PretrainedConfig", model: Any) -> None:
    by_name = dict(model.named_parameters(remove_duplicate=False))
    for head, embedding in pairs(config):
        if head in by_name and embedding in by_name and (by_name[head] is by_name[embedding]) != is_tied(config):
            raise ModelError(
                f"transformers and config.json disagree on whether the head of the model {str(path)!r} is tied to its "
                "embedding: set tie_word_embeddings in config.json to match its files"
            )
