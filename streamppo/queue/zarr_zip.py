"""Writes a zarr group as one zip file, entry for entry as zarr does (format 3, https://zarr-specs.readthedocs.io).

zarr itself takes more than a millisecond of CPU for every array, most of it to hand work to its threads and back; a
batch has some fifteen arrays. Files are read by zarr alone.
"""

# numcodecs has no types.
# pyright: standard

import io
import zipfile
from collections.abc import Mapping

import msgspec
import numpy as np
from numcodecs.registry import get_codec
from numpy.typing import NDArray

LEVEL = 1
"""Of zstd: fast, and tokens and versions still become a tenth."""
ZSTD = get_codec({"id": "zstd", "level": LEVEL})


def packed(columns: Mapping[str, NDArray[np.generic]], attributes: Mapping[str, object]) -> memoryview:
    """The content of a file with `columns`, each as one chunk, and `attributes`."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, mode="w") as file:
        _entry(file, "zarr.json", {"attributes": attributes, "zarr_format": 3, "node_type": "group"})
        for name, column in columns.items():
            _entry(file, f"{name}/zarr.json", _described(column))
            chunk = "/".join("0" for _ in column.shape)
            content = ZSTD.encode(np.ascontiguousarray(column))
            assert isinstance(content, bytes)
            file.writestr(f"{name}/c/{chunk}", content)
    return whole.getbuffer()


def _described(column: NDArray[np.generic]) -> dict[str, object]:
    single = column.dtype.itemsize == 1
    shape, order = list(column.shape), {} if single else {"configuration": {"endian": "little"}}
    assert single or column.dtype.newbyteorder("<") == column.dtype, "a big-endian column"
    return {
        "shape": shape,
        "data_type": column.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": column.dtype.type(0).item(),
        "codecs": [
            {"name": "bytes", **order},
            {"name": "zstd", "configuration": {"level": LEVEL, "checksum": False}},
        ],
        "attributes": {},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _entry(file: zipfile.ZipFile, name: str, content: Mapping[str, object]) -> None:
    file.writestr(name, msgspec.json.encode(content))
