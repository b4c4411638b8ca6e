"""Compares a model's files with the model that its configuration describes, before weights are read.

transformers loads tensors without data (on the meta device), with the files' names, dtypes and shapes, into a model
without data. So names that transformers renames, joins or ignores are treated as in a real load.
"""

import difflib
import re
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from streamppo.errors import ModelError
from streamppo.weights.models import classes, folder, headers
from streamppo.weights.models.classes import Kind
from streamppo.weights.models.settings import is_tied, naming, pairs, pairs_in_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Shape: TypeAlias = tuple[int, ...]
MOST_SHOWN = 3
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights by their names in safetensors. Other dtypes belong to buffers, and count as float32 here."""
NUMBERED = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


class Report(NamedTuple):
    """Tensors that do not fit, by their names in the files if these are known, otherwise by those in the model."""

    missing: Collection[str] = ()
    unexpected: Collection[str] = ()
    misshaped: Mapping[str, tuple[Shape, Shape]] = {}

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped)

    def of_body(self, prefix: str, kind: Kind, *, body: bool) -> "Report":
        """Drop entries outside the transformer if `body`; for a classifier, drop only unexpected entries outside it."""

        def is_inside(name: str) -> bool:
            return not prefix or name.startswith(f"{prefix}.")

        if body:
            shapes = {name: pair for name, pair in self.misshaped.items() if is_inside(name)}
            return Report([*filter(is_inside, self.missing)], [*filter(is_inside, self.unexpected)], shapes)
        if kind == "AutoModelForSequenceClassification":
            return self._replace(unexpected=[*filter(is_inside, self.unexpected)])
        return self


def check(path: Path, config: "PretrainedConfig", kind: Kind = "AutoModelForCausalLM", *, body: bool = False) -> int:
    """Compare the files at `path` with the model of `config`. Returns the number of tensors in the files.

    With `body`, only the transformer must be in the files, because a critic has its own head. Raises `ModelError` with
    the names of tensors that are missing, unexpected or misshaped, and the errors of `folder.check`.
    """
    shapes = _shapes(path)
    tensors = dict(shapes)
    for head, _ in pairs_in_files(config, shapes) if is_tied(config) else ():
        # Head and embedding have equal values. transformers would compare them, which takes memory.
        tensors.pop(head)
    with naming(path), quiet():
        # The parts that are not trained are compared too, because an export writes them.
        model_class = classes.model_class(config, kind, whole=True)
        config = classes.fitting(model_class, config)
        reported = _report(model_class, config, tensors)
    reported = reported.of_body(model_class.base_model_prefix, kind, body=body)
    if reported:
        refuse(path, config, _as_file_names(model_class, config, shapes, reported), shapes)
    return len(shapes)


def report(info: Mapping[str, object]) -> Report:
    """Convert transformers' report of a load (`output_loading_info`)."""
    missing, unexpected = (cast("set[str]", info[name]) for name in ("missing_keys", "unexpected_keys"))
    shapes = cast("set[tuple[str, Shape, Shape]]", info["mismatched_keys"])
    return Report(
        missing, unexpected, {name: (tuple(file_shape), tuple(model_shape)) for name, file_shape, model_shape in shapes}
    )


def refuse(model_folder: Path, config: "PretrainedConfig", reported: Report, file_names: Collection[str]) -> None:
    """Raise `ModelError` about the `reported` tensors of `model_folder`, whose files have the tensors `file_names`."""
    folder.refuse_names(model_folder, file_names)
    sentences = list(_sentences(config, reported, file_names))
    more = f" (and {len(sentences) - MOST_SHOWN} more)" if len(sentences) > MOST_SHOWN else ""
    hint = _hint(config, reported, file_names)
    raise ModelError(
        f"{model_folder}: its files do not match its config.json: {'; '.join(sentences[:MOST_SHOWN])}{more}{hint}"
    )


@contextmanager
def quiet() -> Generator[None]:
    """Stop transformers from logging its load reports in the block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def find_not_finite(folder_path: Path) -> str:
    """Return the name of the first tensor in the files at `folder_path` with NaN or infinity; "" if there is none."""
    from safetensors import safe_open

    if (stored := folder.check(folder_path)) is None:
        return first_not_finite(headers.pickle_tensors(folder_path))
    for file in sorted({header.file for header in stored.values()}):
        with safe_open(file, framework="pt") as opened:
            names = [name for name, header in stored.items() if header.file == file]
            first = next((name for name in names if first_not_finite({name: opened.get_tensor(name)})), "")
        if first:
            return first
    return ""


@torch.no_grad()
def first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first of `tensors` with a NaN or an infinity; "" if all are finite."""
    for name, tensor in tensors.items():
        # aminmax takes one pass and no memory, and returns NaN if any entry is NaN.
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            return name
    return ""


def _shapes(model_folder: Path) -> dict[str, Tensor]:
    stored = folder.check(model_folder)
    if stored is None:
        pickled = headers.pickle_tensors(model_folder, "meta")
        folder.refuse_names(model_folder, pickled)
        return pickled
    return {
        name: torch.empty(header.shape, dtype=DTYPES.get(header.dtype, torch.float32), device="meta")
        for name, header in stored.items()
    }


def _report(model_class: "type[PreTrainedModel]", config: "PretrainedConfig", tensors: dict[str, Tensor]) -> Report:
    options: dict[str, Any] = {"device_map": {"": "meta"}, "dtype": torch.float32, "ignore_mismatched_sizes": True}
    # config.json may name an attention implementation that is not installed.
    options["attn_implementation"] = "eager"
    try:
        loaded: Any = model_class.from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True, **options
        )
    except RuntimeError as error:
        if "conversion" not in str(error):
            raise
        # The experts differ in shape or number. `_as_file_names` finds the differing tensors by the files' names.
        return Report(missing=["experts"])
    if loaded[0].base_model is loaded[0]:
        raise ValueError(
            f"{model_class.__name__} of transformers does not separate its transformer from its head: not supported"
        )
    return report(loaded[1])


def _as_file_names(
    model_class: "type[PreTrainedModel]",
    config: "PretrainedConfig",
    file_tensors: Mapping[str, Tensor],
    reported: Report,
) -> Report:
    """Replace the names in `reported` by those of the files, if most names that transformers saves are in the files."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        empty = model_class(config)
    heads = {head for head, _ in pairs(config)} if is_tied(config) else set[str]()
    state = {name: tensor for name, tensor in empty.state_dict().items() if name not in heads}
    expected = revert_weight_conversion(empty, state)
    if 2 * len(expected.keys() & file_tensors.keys()) < len(expected):
        return reported
    shapes = {
        name: (tuple(file_tensors[name].shape), tuple(tensor.shape))
        for name, tensor in expected.items()
        if name in file_tensors
    }
    misshaped = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    missing = sorted(expected.keys() - file_tensors.keys())
    if reported.missing == ["experts"]:
        return Report(missing, sorted(file_tensors.keys() - expected.keys() - heads), misshaped)
    if missing or misshaped or reported.unexpected:
        return Report(missing if reported.missing or reported.misshaped else (), reported.unexpected, misshaped)
    return reported


def _sentences(config: "PretrainedConfig", reported: Report, file_names: Collection[str]) -> Iterator[str]:
    for name in sorted(reported.missing):
        near = difflib.get_close_matches(name, reported.unexpected or file_names, 1)
        yield f"{name!r} is missing" + (f" (the nearest name in them is {near[0]!r})" if near else "")
    for name, (file_shape, model_shape) in sorted(reported.misshaped.items()):
        yield f"{name!r} has shape {list(file_shape)} in the files and {list(model_shape)} in the model"
    for name in sorted(reported.unexpected):
        near = difflib.get_close_matches(name, reported.missing, 1)
        yield f"{name!r} is not a tensor of the model" + (f" (the nearest is {near[0]!r})" if near else "")


def _hint(config: "PretrainedConfig", reported: Report, file_names: Collection[str]) -> str:
    text = config.get_text_config()
    layers, stored_layers = getattr(text, "num_hidden_layers", 0), _layers(file_names)
    if stored_layers and (_layers(reported.unexpected) > layers or _layers(reported.missing) > stored_layers):
        return f". config.json has num_hidden_layers = {layers}, but the files have {stored_layers} layers"
    heads = {head for head, _ in pairs(config)}
    if heads & set(reported.missing):
        return ". Set tie_word_embeddings = true in config.json if the model's head is its embedding"
    if any("embed" in name or "wte" in name for name in reported.misshaped):
        return f". vocab_size is {text.vocab_size:,} in config.json"
    return ""


def _layers(names: Collection[str]) -> int:
    return max((1 + int(number[1]) for name in names if (number := NUMBERED.search(name))), default=0)
