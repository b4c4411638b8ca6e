"""Reads the tensors' names, dtypes, shapes and offsets from the headers of the files in a model folder.

    model.safetensors                   one file
    model.safetensors.index.json        several parts; the index names the part of each tensor
    pytorch_model.bin, .bin.index.json  pickles, which only torch can read

Like transformers, this module uses the first of these files that exists. Only reading pickles needs torch.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, NamedTuple, cast
from zipfile import is_zipfile

from streamppo import durable
from streamppo.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
LARGEST_HEADER = 100_000_000
"""The maximum number of bytes of a safetensors header, the limit of the safetensors library."""


class Header(NamedTuple):
    """A tensor in a file: its dtype as safetensors names it, its shape, and its byte range `begin` to `end`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


Headers = Mapping[str, Header]


def folder_headers(folder: Path) -> dict[str, Header] | None:
    """Read the headers of a folder's safetensors files; None if it has only pickles. Raises `ModelError`."""
    files = weight_files(folder)
    if files[0].suffix == ".bin":
        for file in files:
            refuse_pointer(file)
        return None
    headers: dict[str, Header] = {}
    for file in files:
        for name, header in file_header(file).items():
            if name in headers:
                raise ModelError(f"{folder}: {name!r} is in {headers[name].file.name} and in {file.name}")
            headers[name] = header
    if not (folder / SINGLE).is_file():
        _compare(folder / INDEX, headers)
    return headers


def has_weights(folder: Path) -> bool:
    """Return whether a folder has a file of weights or an index, without checking their content."""
    return any((folder / name).exists() for name in (SINGLE, INDEX, PICKLE, PICKLE_INDEX))


def weight_files(folder: Path) -> list[Path]:
    """Return the files from which transformers reads weights. Raises `ModelError` if a file is missing."""
    for single, index in ((SINGLE, INDEX), (PICKLE, PICKLE_INDEX)):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _parts(folder / index)
    raise ModelError(f"{folder}: no weights: neither {SINGLE} nor parts of it with an index")


def weight_map(index: Path) -> dict[str, str]:
    """Read the file name of each tensor's part from an index. Raises `ModelError` if the file is not an index."""
    refuse_pointer(index)
    try:
        content: object = json.loads(durable.read(index))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{index}: not an index of weights: {error}") from error
    named = cast("Mapping[str, object]", content).get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(part, str) for part in named.values()):
        raise ModelError(f"{index}: not an index of weights: it has no weight_map of names and files")
    return cast("dict[str, str]", named)


def _parts(index: Path) -> list[Path]:
    parts = [index.parent / part for part in sorted(set(weight_map(index).values()))]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{index.parent}: {missing[0]}{more} of the {len(parts)} parts are missing: copy or download them again"
        )
    return parts


def _compare(index: Path, headers: Headers) -> None:
    for name, part in weight_map(index).items():
        if name not in headers or headers[name].file.name != part:
            elsewhere = f" ({headers[name].file.name} has it)" if name in headers else ""
            raise ModelError(
                f"{index}: it says that {name!r} is in {part}, which has no such tensor{elsewhere}: index and parts "
                "do not belong to one model; copy or download the folder again"
            )


def file_header(file: Path) -> dict[str, Header]:
    """Read the header of a safetensors file. Raises `ModelError` if it is damaged or truncated."""
    refuse_pointer(file)
    try:
        size = file.stat().st_size
        with durable.reading(file) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, LARGEST_HEADER):
                raise ValueError(f"its first bytes are not a header ({size:,} bytes in all)")
            content: object = json.loads(opened.read(length))
        headers = dict(_tensors(file, content, 8 + length))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        text = f"{file}: not a file of safetensors: {error}; copy or download it again"
        raise ModelError(text) from error
    if (end := max((header.end for header in headers.values()), default=8 + length)) != size:
        raise ModelError(f"{file}: {size:,} bytes, but its header says {end:,}: copy or download it again")
    return headers


def _tensors(file: Path, content: object, first: int) -> Iterator[tuple[str, Header]]:
    if not isinstance(content, dict):
        raise TypeError("its header is not a table")
    for name, entry in cast("dict[str, dict[str, object]]", content).items():
        if name != "__metadata__":
            begin, end = cast("list[int]", entry["data_offsets"])
            shape = tuple(cast("list[int]", entry["shape"]))
            yield name, Header(file, str(entry["dtype"]), shape, first + begin, first + end)


def pickle_tensors(folder: Path, device: str = "cpu") -> "dict[str, Tensor]":
    """Return a folder's pickled tensors, memory-mapped; with "meta" without data. Raises `ModelError`."""
    import torch

    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        refuse_pointer(file)
        try:
            # A file from before torch 1.6 is not a zip file and cannot be mapped.
            with warnings.catch_warnings(action="ignore"):
                content: object = torch.load(file, map_location=device, weights_only=True, mmap=is_zipfile(file))
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            text = " ".join(str(error).split())[:200]
            raise ModelError(f"{file}: not a pickle of tensors: {text}; save the model as safetensors") from error
        if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
            raise ModelError(f"{file}: a pickle with more than tensors by name: save the model as safetensors")
        tensors |= cast("dict[str, Tensor]", content)
    return tensors


def refuse_pointer(file: Path) -> None:
    """Raise `ModelError` if `file` is only a git-LFS pointer, or cannot be read."""
    try:
        is_pointer = durable.is_pointer(file)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    if is_pointer:
        raise ModelError(f"{file}: {durable.POINTER}")
