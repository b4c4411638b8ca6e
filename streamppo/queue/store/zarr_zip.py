"""Writes a zarr group as one zip file, entry for entry as zarr does (format 3, https://zarr-specs.readthedocs.io).

zarr itself takes more than a millisecond of CPU for every array, and runs any codec that a file names, even pickle's.
`unpack` accepts exactly what `pack` writes, so it is safe to read untrusted files.
"""

# numcodecs has no types.
# pyright: standard

import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, BinaryIO, Literal

import msgspec
import numpy as np
from numcodecs.registry import get_codec
from numpy.typing import NDArray

LEVEL = 1
"""The zstd level: it is fast, and compresses tokens and versions to a tenth."""
ZSTD = get_codec({"id": "zstd", "level": LEVEL})
MAGIC, BLOCK_BYTES = b"\x28\xb5\x2f\xfd", 2**17
"""The magic number of a zstd frame, and the maximum number of bytes in one of its blocks."""
MOST_BYTES, MOST_RATIO = 2**31, 100
"""Columns may take up to MOST_BYTES + MOST_RATIO * (bytes of the file) of memory."""
MOST_COLUMNS = 100
TYPES = ("bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")


class ForeignFile(ValueError):
    """Raised for a file that `pack` did not write."""


class ColumnMetadata(msgspec.Struct):
    """The fields of a column's metadata from which all its other fields follow."""

    shape: list[Annotated[int, msgspec.Meta(ge=0, lt=2**48)]]
    data_type: str


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """The metadata of a file."""

    attributes: msgspec.Raw
    zarr_format: Literal[3]
    node_type: Literal["group"]


def pack(columns: Mapping[str, NDArray[np.generic]], attributes: Mapping[str, object]) -> memoryview:
    """The content of a file with `attributes` and `columns`, one chunk each, compressed within `unpack`'s bound."""
    assert len(columns) <= MOST_COLUMNS, "more columns than are read"
    contents = {name: _compress(column) for name, column in columns.items()}
    if _is_bomb(sum(array.nbytes for array in columns.values()), sum(map(len, contents.values()))):
        contents = {name: _store_raw(column) for name, column in columns.items()}
    content = io.BytesIO()
    with zipfile.ZipFile(content, mode="w") as file:
        _entry(file, "zarr.json", {"attributes": attributes, "zarr_format": 3, "node_type": "group"})
        for name, column in columns.items():
            _entry(file, f"{name}/zarr.json", _column_metadata(column.dtype, column.shape))
            file.writestr(_chunk(name, column.shape), contents[name])
    return content.getbuffer()


def _compress(column: NDArray[np.generic]) -> bytes:
    assert column.dtype.itemsize == 1 or column.dtype.newbyteorder("<") == column.dtype, "a big-endian column"
    assert column.dtype.name in TYPES and 1 <= column.ndim <= 2, "a column that is not read"
    content = ZSTD.encode(np.ascontiguousarray(column))
    assert isinstance(content, bytes)
    return content


def _store_raw(column: NDArray[np.generic]) -> bytes:
    """Write an uncompressed zstd frame: a header with the content's size, and raw blocks (RFC 8878, 3.1.1)."""
    content = np.ascontiguousarray(column).tobytes()
    parts = [MAGIC, b"\xe0", len(content).to_bytes(8, "little")]
    for begin in range(0, len(content) or 1, BLOCK_BYTES):
        block = content[begin : begin + BLOCK_BYTES]
        is_last = begin + BLOCK_BYTES >= len(content)
        parts += [(is_last | len(block) << 3).to_bytes(3, "little"), block]
    return b"".join(parts)


def _is_bomb(total: int, size: int) -> bool:
    return total > MOST_BYTES + MOST_RATIO * size


def unpack(file: BinaryIO) -> tuple[dict[str, NDArray[np.generic]], msgspec.Raw]:
    """Read a file's columns, and its attributes as JSON; check sizes before allocation. Raises `ForeignFile`."""
    try:
        with zipfile.ZipFile(file) as opened:
            return _unpack(opened, file.seek(0, io.SEEK_END))
    except ForeignFile:
        raise
    # Encrypted entries raise RuntimeError, a wrong central directory raises struct.error.
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, struct.error) as error:
        raise ForeignFile(f"{error or type(error).__name__}") from error


def _unpack(file: zipfile.ZipFile, size: int) -> tuple[dict[str, NDArray[np.generic]], msgspec.Raw]:
    entries = {entry.filename: entry for entry in file.infolist()}
    if len(entries) != len(file.infolist()) or len(entries) > 2 * MOST_COLUMNS + 1:
        raise ForeignFile(f"{len(file.infolist())} entries, or several of one name")
    if any(
        entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size
        for entry in entries.values()
    ):
        raise ForeignFile("an entry is compressed")
    if sum(entry.file_size for entry in entries.values()) > size:
        raise ForeignFile("its entries are longer than the file")
    group = msgspec.json.decode(file.read("zarr.json") if "zarr.json" in entries else b"", type=Group)
    names = [name.removesuffix("/zarr.json") for name in entries if name.endswith("/zarr.json")]
    described = {name: _read_description(file.read(f"{name}/zarr.json")) for name in names}
    expected = {"zarr.json", *(f"{name}/zarr.json" for name in names)}
    expected |= {_chunk(name, shape) for name, (_, shape) in described.items()}
    if expected != entries.keys():
        raise ForeignFile(
            f"entries without a column, or missing entries of one: {sorted(expected ^ entries.keys())[:3]}"
        )
    if _is_bomb(total := sum(_bytes(*entry) for entry in described.values()), size):
        raise ForeignFile(f"columns of {total:,} bytes in a file of {size:,}")
    return {
        name: _column(file.read(_chunk(name, entry[1])), *entry) for name, entry in described.items()
    }, group.attributes


def _read_description(content: bytes) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    metadata = msgspec.json.decode(content, type=ColumnMetadata)
    if metadata.data_type not in TYPES or not 1 <= len(metadata.shape) <= 2:
        raise ForeignFile(f"a column of {metadata.data_type!r} with the shape {metadata.shape}")
    description = np.dtype(metadata.data_type), tuple(metadata.shape)
    if content != msgspec.json.encode(_column_metadata(*description)):
        raise ForeignFile("a column with other metadata than streamppo's")
    return description


def _column(content: bytes, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    if _frame_bytes(content) != _bytes(dtype, shape):
        raise ForeignFile(f"a chunk of {_frame_bytes(content)} bytes for a column of {_bytes(dtype, shape)}")
    column = np.zeros(shape, dtype)
    if column.nbytes:
        ZSTD.decode(content, out=column.reshape(-1).view(np.uint8))
    return column


def _bytes(dtype: np.dtype[np.generic], shape: Sequence[int]) -> int:
    return dtype.itemsize * prod(shape)


def _frame_bytes(content: bytes) -> int | None:
    """Read the content size in a zstd frame's header (RFC 8878, 3.1.1.1); None if the header has none."""
    if content[:4] != MAGIC or len(content) < 6:
        return None
    is_single = bool(content[4] & 0x20)
    at = 5 + (not is_single) + (0, 1, 2, 4)[content[4] & 3]
    width = (int(is_single), 2, 4, 8)[content[4] >> 6]
    if not width or len(content) < at + width:
        return None
    return int.from_bytes(content[at : at + width], "little") + (256 if width == 2 else 0)


def _chunk(name: str, shape: Sequence[int]) -> str:
    return f"{name}/c/{'/'.join('0' for _ in shape)}"


def _column_metadata(dtype: np.dtype[np.generic], shape: Sequence[int]) -> dict[str, object]:
    return {
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": dtype.type(0).item(),
        "codecs": [
            {"name": "bytes", **({} if dtype.itemsize == 1 else {"configuration": {"endian": "little"}})},
            {"name": "zstd", "configuration": {"level": LEVEL, "checksum": False}},
        ],
        "attributes": {},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _entry(file: zipfile.ZipFile, name: str, content: Mapping[str, object]) -> None:
    file.writestr(name, msgspec.json.encode(content))
