"""Reads untrusted files of torch.distributed.checkpoint without running code from them.

torch itself unpickles `.metadata` and every value that is not a tensor. In this reader `.metadata` may name only
torch's metadata classes and only files in the checkpoint's folder. Other values are loaded with `weights_only`.
"""
# torch leaves parts of its signatures untyped.
# pyright: standard

import io
import logging
import os
import pickle
import pickletools
import warnings
from contextlib import nullcontext
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from streamppo import durable
from streamppo.errors import CheckpointError

METADATA = ".metadata"
"""The file that maps tensors to files."""
PACKAGE = "torch.distributed.checkpoint"
PATHS = ("pathlib.PosixPath", "pathlib._local.PosixPath")
"""The class of a path; a checkpoint that Python 3.13 wrote has the second name, which other versions lack."""
NAMED = {
    *(f"{PACKAGE}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"{PACKAGE}.metadata.{name}" for name in ("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    f"{PACKAGE}.metadata.BytesStorageMetadata",
    f"{PACKAGE}.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    *PATHS,
}
"""All names that `.metadata` may contain, except tensor dtypes."""
MOST_PARTS = 10**8
GROWS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""Opcodes that extend the stack object below their operands."""
MARK = [0]


def load(tensors: dict[str, Any], path: Path, *, alone: bool = False) -> None:
    """Load the checkpoint at `path` in place. A collective, unless `alone`.

    Raises `CheckpointError` for files that lack a tensor or contain a forbidden name.
    """
    root, reader = logging.getLogger(), Reader(path)
    root.addFilter(_is_no_fallback)
    try:
        with warnings.catch_warnings() if alone else nullcontext():
            if alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader, planner=Planner(), no_dist=alone)  # pyright: ignore
    except dcp.api.CheckpointException as error:
        reasons = [reader.refusal, *(failure for failure, _ in error.failures.values())]
        raise CheckpointError(f"{path}: cannot be loaded: {next(filter(None, reasons))}") from error
    finally:
        root.removeFilter(_is_no_fallback)


def empty_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return an empty, unsharded tensor, without memory yet, for each tensor of a checkpoint, by its flat name."""
    stored = Reader(path).read_metadata().state_dict_metadata
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _is_no_fallback(record: logging.LogRecord) -> bool:
    """A log filter: False for torch's traceback of unreadable metadata, because `load` raises the same error."""
    return record.module != "state_dict_loader"


class Reader(FileSystemReader):
    """torch's reader; it unpickles only metadata classes, and accepts only files in the checkpoint's folder."""

    refusal: CheckpointError | None = None
    """The reason why the metadata were refused; the oldest supported torch does not pass it on."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        try:
            return self._read_metadata()
        except CheckpointError as error:
            self.refusal = error
            raise

    def _read_metadata(self) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            content = durable.read(path)
            _refuse_repeats(content)
            metadata = _Unpickler(io.BytesIO(content)).load()
            files = {stored.relative_path for stored in metadata.storage_data.values()}
        except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        if not isinstance(metadata, Metadata) or any(os.path.basename(name) != name for name in files):
            raise CheckpointError(f"{path}: not a checkpoint's metadata, or metadata that name files elsewhere")
        return metadata


class Planner(DefaultLoadPlanner):
    """torch's planner, restricted: it unpickles only plain values and tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


def _refuse_repeats(content: bytes) -> None:
    """Raise `ValueError` for a pickle of more than `MOST_PARTS` values: nested pairs (x, x) take exponential time."""
    stack, memo = list[list[int]](), dict[int, list[int]]()
    for opcode, argument, _ in pickletools.genops(content):
        place = argument if isinstance(argument, int) else len(memo)
        match opcode.name:
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[place] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[place])
            case "DUP":
                stack.append(stack[-1])
            case "MARK":
                stack.append(MARK)
            case name:
                _reduce(stack, opcode, grows=name in GROWS)
        if stack and stack[-1][0] > MOST_PARTS:
            raise ValueError(f"more than {MOST_PARTS:,} values, nearly all of them repeated")


def _reduce(stack: list[list[int]], opcode: pickletools.OpcodeInfo, *, grows: bool) -> None:
    """Replace an opcode's operands by its result; if the opcode extends an object, add to that object's count."""
    operands = opcode.stack_before
    parts = 0
    if pickletools.markobject in operands:
        while (part := stack.pop()) is not MARK:
            parts += part[0]
        operands = operands[: operands.index(pickletools.markobject)]
    if grows:
        for _ in operands[1:]:
            parts += stack.pop()[0]
        stack[-1][0] += parts
        return
    parts += sum(stack.pop()[0] for _ in operands)
    stack.extend([1 + parts] for _ in opcode.stack_after)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> object:
        """Return a metadata class or a tensor dtype; raise `UnpicklingError` for any other name."""
        if f"{module}.{name}" in PATHS:
            return PosixPath
        if f"{module}.{name}" in NAMED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is in no checkpoint of streamppo")
