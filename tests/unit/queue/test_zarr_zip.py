"""The archive's own writer beside zarr: the same entries, and zarr reads them."""

import json
import zipfile
from pathlib import Path

import numpy as np
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import ZipStore

from streamppo.queue import zarr_zip

COLUMNS = {
    "tokens": np.arange(1, 900, dtype=np.int32),
    "offsets": np.array([1, 2, 2**40]),
    "mask": np.array([True, False, True]),
    "logprobs": np.linspace(-3, -1, 7, dtype=np.float32),
    "components": np.array([[1.0, np.nan], [0.5, 2.0]]),
}
ATTRIBUTES = {"version": 3, "tasks": ["é", "b"]}


def normal(content: bytes) -> str:
    """JSON in one order; 0, 0.0 and false stay different."""
    return json.dumps(json.loads(content), sort_keys=True)


def test_every_entry_is_the_one_that_zarr_writes(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.zip", tmp_path / "theirs.zip"
    ours.write_bytes(zarr_zip.packed(COLUMNS, ATTRIBUTES))
    with ZipStore(theirs, mode="w") as store:
        group = zarr.create_group(store, attributes=ATTRIBUTES)
        for name, column in COLUMNS.items():
            group.create_array(name, data=column, chunks=column.shape, compressors=ZstdCodec(level=1))
    with zipfile.ZipFile(ours) as one, zipfile.ZipFile(theirs) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        for name in one.namelist():
            contents = [file.read(name) for file in (one, other)]
            found, expected = map(normal, contents) if name.endswith(".json") else contents
            assert found == expected, name


def test_zarr_reads_what_was_written_also_columns_of_zeros_alone(tmp_path: Path) -> None:
    columns = {
        **COLUMNS,
        "zeros": np.zeros((3, 2), np.int64),
        "none": np.zeros(2, np.bool_),
        "empty": np.zeros(0, "<i4"),
    }
    (tmp_path / "a.zip").write_bytes(zarr_zip.packed(columns, ATTRIBUTES))
    with ZipStore(tmp_path / "a.zip", mode="r") as store:
        group = zarr.open_group(store, mode="r")
        assert dict(group.attrs) == ATTRIBUTES
        assert sorted(group.array_keys()) == sorted(columns)
        for name, column in columns.items():
            found = np.asarray(group[name][:])  # pyright: ignore[reportIndexIssue, reportArgumentType]
            np.testing.assert_array_equal(found, column, err_msg=name)
            assert found.dtype == column.dtype
