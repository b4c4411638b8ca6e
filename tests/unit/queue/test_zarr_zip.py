"""The archive's own writer beside zarr: the same entries, and zarr reads them."""

import io
import json
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import ZipStore

from streamppo.queue.store import zarr_zip

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
    ours.write_bytes(zarr_zip.pack(COLUMNS, ATTRIBUTES))
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
    (tmp_path / "a.zip").write_bytes(zarr_zip.pack(columns, ATTRIBUTES))
    with ZipStore(tmp_path / "a.zip", mode="r") as store:
        group = zarr.open_group(store, mode="r")
        assert dict(group.attrs) == ATTRIBUTES
        assert sorted(group.array_keys()) == sorted(columns)
        for name, column in columns.items():
            found = np.asarray(group[name][:])  # pyright: ignore[reportIndexIssue, reportArgumentType]
            np.testing.assert_array_equal(found, column, err_msg=name)
            assert found.dtype == column.dtype


def entries(content: bytes | memoryview) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {name: file.read(name) for name in file.namelist()}


def packed_again(changed: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> io.BytesIO:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", method) as file:
        for name, content in changed.items():
            file.writestr(name, content)
    return whole


def test_what_was_packed_is_unpacked() -> None:
    columns, attributes = zarr_zip.unpack(io.BytesIO(zarr_zip.pack(COLUMNS, ATTRIBUTES)))
    assert json.loads(bytes(attributes)) == ATTRIBUTES and columns.keys() == COLUMNS.keys()
    for name, column in COLUMNS.items():
        np.testing.assert_array_equal(columns[name], column)
        assert columns[name].dtype == column.dtype


FILTER = b'"codecs":[{"name":"numcodecs.pickle"},'
OTHER = {
    "another codec": ("tokens/zarr.json", lambda text: text.replace(b'"zstd"', b'"numcodecs.pickle"')),
    "a filter": (
        "tokens/zarr.json",
        lambda text: text.replace(b'"codecs":[', FILTER),
    ),
    "an absurd shape": ("tokens/zarr.json", lambda text: text.replace(b"[899]", b"[899999999999]")),
    "a negative shape": ("tokens/zarr.json", lambda text: text.replace(b"[899]", b"[-899]")),
    "a shape that is not the chunk's": ("tokens/zarr.json", lambda text: text.replace(b"[899]", b"[898]")),
    "a chunk of another frame": ("tokens/c/0", lambda _: zarr_zip.ZSTD.encode(np.zeros(900, np.int32))),
    "a chunk that is not a frame": ("tokens/c/0", lambda _: b"x" * 100),
    "format 2": ("zarr.json", lambda text: text.replace(b'"zarr_format":3', b'"zarr_format":2')),
    "an entry of nobody": (".zarray", lambda _: b"{}"),
    "a path out of the file": ("../../marker", lambda _: b"{}"),
    "no group": ("zarr.json", lambda _: b"[" * 100_000),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_file_than_streamppo_writes_is_strange(what: str) -> None:
    name, change = OTHER[what]
    found = entries(zarr_zip.pack(COLUMNS, ATTRIBUTES))
    found[name] = change(found.get(name, b""))
    with pytest.raises(zarr_zip.ForeignFile):
        zarr_zip.unpack(packed_again(found))


def test_compressed_entries_and_bombs_are_strange_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = zarr_zip.pack({"tokens": np.zeros(2**22, np.int32)}, {})
    with pytest.raises(zarr_zip.ForeignFile, match="compressed"):
        zarr_zip.unpack(packed_again(entries(zeros), zipfile.ZIP_DEFLATED))
    monkeypatch.setattr(zarr_zip, "MOST_BYTES", 2**20)
    with pytest.raises(zarr_zip.ForeignFile, match=r"columns of 16,777,216 bytes in a file of"):
        zarr_zip.unpack(io.BytesIO(zeros))


BOUND_RATIO = 2
LARGE = {"none": np.zeros(0, np.int32), "ends": np.arange(7), "versions": np.zeros(2**19, np.int32)}
"""As zstd has it they take less than a thousandth; a block of a frame takes a sixteenth of the last one."""


@pytest.mark.parametrize("above", [-1, 0, 1, 10**6])
def test_what_is_written_is_read_also_at_the_bound(above: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = entries(zarr_zip.pack(LARGE, ATTRIBUTES))
    size = sum(len(written[f"{name}/c/0"]) for name in LARGE)
    bound = sum(column.nbytes for column in LARGE.values()) - above
    monkeypatch.setattr(zarr_zip, "MOST_RATIO", BOUND_RATIO)
    monkeypatch.setattr(zarr_zip, "MOST_BYTES", bound - BOUND_RATIO * size)
    file = tmp_path / "a.zip"
    file.write_bytes(zarr_zip.pack(LARGE, ATTRIBUTES))
    assert (file.stat().st_size > 2**21) == (above > 0)
    with file.open("rb") as opened:
        columns, _ = zarr_zip.unpack(opened)
    with ZipStore(file, mode="r") as store:
        group = zarr.open_group(store, mode="r")
        for name, column in LARGE.items():
            np.testing.assert_array_equal(columns[name], column)
            np.testing.assert_array_equal(np.asarray(group[name][:]), column)  # pyright: ignore[reportIndexIssue, reportArgumentType]


def test_500_random_mutations_are_strange_or_columns() -> None:
    whole, generator = bytes(zarr_zip.pack(COLUMNS, ATTRIBUTES)), random.Random(5)
    strange = 0
    for _ in range(500):
        content = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(len(content))] = generator.randrange(256)
        try:
            zarr_zip.unpack(io.BytesIO(content[: generator.randint(len(content) // 2, 2 * len(content))]))
        except zarr_zip.ForeignFile:
            strange += 1
    assert strange > 300
