"""A model's weights from its safetensors files: every rank reads the rows that it has, and nobody reads the whole.

first layers    rank 0 has transformers load them, and compares them with its own reading: of a family whose files are
                made another way rank 0 reads everything, and sends it
names           those of the files, by transformers' own conversion: experts of a layer are one parameter here
"""

import hashlib
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from streamppo.errors import ModelError
from streamppo.learner import layers, pretrained
from streamppo.weights.models import fit, headers
from streamppo.weights.models.loading import fetch
from streamppo.weights.models.settings import settings

log = logging.getLogger(__name__)
LARGE = 1 << 26
"""Bytes of a model in 16 bits below which rank 0 reads them faster than all ranks agree about them."""
SAMPLED = 256
"""Tensors that are looked at to see whether all ranks have the same model."""
FIRST = 2
"""The fewest layers that are compared."""


class Files:
    """The tensors of a model's files, which stay open; `names` has the file of each."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._open: dict[str, Any] = {}

    def tensor(self, name: str) -> Any:
        """The tensor called `name`, of which nothing is read before it is sliced. Raises `SafetensorError`."""
        file = self.names[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(name)


class Source(NamedTuple):
    """The tensors of files that make a parameter: one; or several for each of its rows, end to end."""

    rows: tuple[tuple[str, ...], ...]
    is_one: bool

    def read(self, files: Files, begin: int, end: int) -> Tensor:
        """Read the rows from `begin` to `end`, in float32."""
        if self.is_one:
            return files.tensor(self.rows[0][0])[begin:end].float()
        return torch.stack([torch.cat([files.tensor(name)[:] for name in row]).float() for row in self.rows[begin:end]])


class Plan(NamedTuple):
    """The parameters of a causal LM by their names: what they are made of, in `files`.

    `first` is the model with its first layers alone, on rank 0.
    """

    files: Files
    sources: Mapping[str, Source]
    prefix: str
    first: Any

    def read(self, name: str, begin: int, end: int) -> Tensor | None:
        """Read rows of a parameter of `Policy`; None for one that no file has."""
        body = name.removeprefix("critic.")
        known = name.removeprefix("lm.") if body == name else f"{self.prefix}.{body}"
        source = self.sources.get(known)
        return None if source is None else source.read(self.files, begin, end)


def plan(path: str, critic: str, *, adapted: bool) -> Plan | None:
    """Find out how all ranks can read the model at `path`, for a critic of the configuration. A collective.

    None if rank 0 reads for all: a small model; one that is `adapted`, or has a critic that is not of its files; files
    that a rank does not see, or has others of; a family that is not read as it should be. Raises
    `ModelError`, on rank 0 also for files that are not of the model.
    """
    found = None if adapted or critic not in ("head", "policy") else _files(path)
    mine = "" if found is None else _digest(found)
    seen = [""] * dist.get_world_size()
    dist.all_gather_object(seen, mine)
    if found is None or seen.count(mine) < len(seen):
        return None
    if dist.get_rank() == 0:
        fit.check(fetch(path), settings(path))
    with torch.device("meta"):
        whole = pretrained.read(path, "eager", weights=False)
    sources = {name: _source(whole, name, one) for name, one in whole.named_parameters()}
    config = _of_first_layers(settings(path), whole)
    known = {name: one for name, one in sources.items() if one and _has(found, one)}
    sees = [config is not None and len(known) == len(sources)]
    first: Any = None
    if dist.get_rank() == 0 and sees[0]:
        first = _first(config, found, known)
        sees = [_is_read_alike(first, found, known)]
    dist.broadcast_object_list(sees, src=0)
    if not sees[0]:
        _tell(path)
        return None
    return Plan(found, known, whole.base_model_prefix, first)


def _digest(files: Files) -> str:
    """The same for the same model: of all names, and of the first rows of `SAMPLED` tensors, where others differ."""
    digest = hashlib.blake2b("\n".join(sorted(files.names)).encode())
    names = [name for name in sorted(files.names) if files.tensor(name).get_shape()]
    for name in names[:: -(-len(names) // SAMPLED)]:
        digest.update(files.tensor(name)[:1].float().numpy().tobytes())
    return digest.hexdigest()


def _tell(path: str) -> None:
    if dist.get_rank() == 0:
        log.info("rank 0 reads the whole model %r into its memory: its files have other tensors than its layers", path)


def _files(path: str) -> Files | None:
    """The safetensors files of a large model; None for any other, and on ranks but the first for files not there."""
    try:
        found = headers.of_folder(fetch(path))
    except ModelError:
        if dist.get_rank() == 0:
            raise
        return None
    if found is None or sum(2 * math.prod(one.shape) for one in found.values()) < LARGE:
        return None
    return Files({name: str(one.file) for name, one in found.items()})


def _source(whole: Any, name: str, parameter: Tensor) -> Source | None:
    """The tensors of `whole`'s files that make a parameter, as transformers would save it; None if that is not known.

    Of experts it saves all tensors of one kind after those of another.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if not parameter.dim():
        return None
    saved = revert_weight_conversion(whole, {name: parameter})
    if len(saved) == 1:
        ((only, tensor),) = saved.items()
        return Source(((only,),), is_one=True) if tensor.shape == parameter.shape else None
    rows, names = len(parameter), list(saved)
    if len(names) % rows:
        return None
    return Source(tuple(tuple(names[row::rows]) for row in range(rows)), is_one=False)


def _has(files: Files, source: Source) -> bool:
    return all(name in files.names for row in source.rows for name in row)


def _of_first_layers(config: Any, whole: Any) -> Any:
    """The configuration of the first layers, with one of every type; None for a model that cannot be cut off there.

    Buffers of layers, which are in no file, would be missing.
    """
    text: Any = config.get_text_config()
    types = getattr(text, "layer_types", None) or []
    count = max(FIRST, *(1 + types.index(kind) for kind in types)) if types else FIRST
    every = list(layers.layers_of(whole.base_model))
    if any(list(layer.buffers()) for layer in every[count:]):
        return None
    text.num_hidden_layers = min(count, len(every))
    if types:
        text.layer_types = types[: text.num_hidden_layers]
    return config


def _first(config: Any, files: Files, sources: Mapping[str, Source]) -> Any:
    """The model of `config`, as transformers loads it from `files`; no other tensor is read."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(config)
    rows = [row for name, _ in made.named_parameters() for row in sources[name].rows]
    tensors = {name: files.tensor(name)[:] for row in rows for name in row}
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return type(made).from_pretrained(None, config=config, state_dict=tensors, **options)


def _is_read_alike(first: Any, files: Files, sources: Mapping[str, Source]) -> bool:
    """True if `first`, which transformers has loaded, has the weights that a rank would read."""
    return all(torch.equal(sources[name].read(files, 0, len(one)), one) for name, one in first.named_parameters())
