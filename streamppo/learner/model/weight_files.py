"""Reads a model's weights from its safetensors files; each rank reads only its own rows.

first layers    rank 0 loads them with transformers and compares them with what this module reads; if they differ (a
                family with another file format), rank 0 reads everything and sends it
names           tensor names in the files, by transformers' own conversion: in the model, a layer's experts are one
                parameter
"""

import hashlib
import logging
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from streamppo.errors import ModelError
from streamppo.learner.attention import layers
from streamppo.learner.device import from_first_rank, gather
from streamppo.learner.model import hf_files
from streamppo.weights.models import classes, fit, headers
from streamppo.weights.models.loading import fetch
from streamppo.weights.models.settings import settings

log = logging.getLogger(__name__)
LARGE = 1 << 26
"""If a model in 16 bits has fewer bytes than this, rank 0 reads it for all ranks, which is faster."""
SAMPLED = 256
"""Maximum number of tensors that are hashed to compare the models of all ranks."""
FIRST = 2


class TensorFiles:
    """The tensors of a model's files, which are kept open; `names` maps each tensor to its file."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._open: dict[str, Any] = {}

    def tensor(self, name: str) -> Any:
        """The tensor `name`, which is read only when it is sliced. Raises `SafetensorError`."""
        file = self.names[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)


class ParameterSource(NamedTuple):
    """The file tensors of a parameter: one tensor, or for each row several tensors, which are concatenated."""

    rows: tuple[tuple[str, ...], ...]
    is_one: bool

    def read(self, files: TensorFiles, begin: int, end: int) -> Tensor:
        if self.is_one:
            return files.tensor(self.rows[0][0])[begin:end].float()
        return torch.stack([torch.cat([files.tensor(name)[:] for name in row]).float() for row in self.rows[begin:end]])


class LoadPlan(NamedTuple):
    """The sources of a causal LM's parameters in `files`; only rank 0 has `first_layers`, a model of a few layers."""

    files: TensorFiles
    sources: Mapping[str, ParameterSource]
    prefix: str
    first_layers: Any

    def read(self, name: str, begin: int, end: int) -> Tensor | None:
        """Read rows of a parameter of `Policy`; None for a parameter that is in no file."""
        body = name.removeprefix("critic.")
        parameter_name = name.removeprefix("lm.") if body == name else f"{self.prefix}.{body}"
        source = self.sources.get(parameter_name)
        return None if source is None else source.read(self.files, begin, end)


def plan(path: str, critic: str, *, adapted: bool) -> LoadPlan | None:
    """Make the plan by which all ranks read the model at `path`; `critic` is the configuration's choice. A collective.

    Returns None if rank 0 must read for all ranks: the model is small or `adapted`, the critic is not made from the
    model's files, a rank lacks the files or has different ones, or this module and transformers read different weights.
    Raises `ModelError` for files that cannot be read or, on rank 0, do not fit the model.
    """
    files = None if adapted or critic not in ("head", "policy") else _files(path)
    digest = "" if files is None else _digest(files)
    digests = gather(digest)
    if files is None or digests.count(digest) < len(digests):
        return None
    if dist.get_rank() == 0:
        fit.check(fetch(path), settings(path))
    with torch.device("meta"):
        model = hf_files.read(path, "eager", weights=False)
    sources = {name: _source(model, name, parameter) for name, parameter in model.named_parameters()}
    config = _of_first_layers(settings(path), model)
    stored = files.names.keys()
    available = {name: source for name, source in sources.items() if source and stored >= set(chain(*source.rows))}
    is_readable = config is not None and len(available) == len(sources)
    first_layers: Any = None
    if dist.get_rank() == 0 and is_readable:
        first_layers = _load_first_layers(config, files, available)
        is_readable = all(
            torch.equal(available[name].read(files, 0, len(parameter)), parameter)
            for name, parameter in first_layers.named_parameters()
        )
    if not from_first_rank(is_readable):
        if dist.get_rank() == 0:
            log.info("rank 0 reads the whole model %r into its memory: its files store layers in another form", path)
        return None
    prefix = next(name for name, module in model.named_modules() if module is model.base_model)
    return LoadPlan(files, available, prefix, first_layers)


def _digest(files: TensorFiles) -> str:
    """A hash of all tensor names and the first rows of up to `SAMPLED` tensors, to compare the models of ranks."""
    digest = hashlib.blake2b("\n".join(sorted(files.names)).encode())
    names = [name for name in sorted(files.names) if files.tensor(name).get_shape()]
    for name in names[:: -(-len(names) // SAMPLED)]:
        digest.update(files.tensor(name)[:1].float().numpy().tobytes())
    return digest.hexdigest()


def _files(path: str) -> TensorFiles | None:
    """The safetensors files of a large model, else None. For missing files rank 0 raises, and other ranks get None."""
    try:
        stored = headers.folder_headers(fetch(path))
    except ModelError:
        if dist.get_rank() == 0:
            raise
        return None
    if stored is None or sum(2 * math.prod(header.shape) for header in stored.values()) < LARGE:
        return None
    return TensorFiles({name: str(header.file) for name, header in stored.items()})


def _source(model: Any, name: str, parameter: Tensor) -> ParameterSource | None:
    """The file tensors of a parameter of `model`, by transformers' save conversion; None if they are unknown.

    For experts, the conversion lists all tensors of one kind, then all tensors of the next kind.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if not parameter.dim():
        return None
    saved = revert_weight_conversion(model, {name: parameter})
    if len(saved) == 1:
        ((only, tensor),) = saved.items()
        return ParameterSource(((only,),), is_one=True) if tensor.shape == parameter.shape else None
    rows, names = len(parameter), list(saved)
    if len(names) % rows:
        return None
    return ParameterSource(tuple(tuple(names[row::rows]) for row in range(rows)), is_one=False)


def _of_first_layers(config: Any, model: Any) -> Any:
    """The configuration of only the first layers, with every layer type; None if a later layer has buffers."""
    text: Any = config.get_text_config()
    types = getattr(text, "layer_types", None) or []
    count = max(FIRST, *(1 + types.index(kind) for kind in types)) if types else FIRST
    model_layers = list(layers.layers_of(model.base_model))
    if any(list(layer.buffers()) for layer in model_layers[count:]):
        return None
    text.num_hidden_layers = min(count, len(model_layers))
    if types:
        text.layer_types = types[: text.num_hidden_layers]
    return config


def _load_first_layers(config: Any, files: TensorFiles, sources: Mapping[str, ParameterSource]) -> Any:
    with torch.device("meta"):
        model = classes.make(config)
    rows = [row for name, _ in model.named_parameters() for row in sources[name].rows]
    tensors = {name: files.tensor(name)[:] for row in rows for name in row}
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return type(model).from_pretrained(None, config=config, state_dict=tensors, **options)
