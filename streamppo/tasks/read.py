"""Rows of a data set: one file, a folder of files, a folder by `save_to_disk`, or a name on the hub."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from streamppo.errors import TaskError

Row: TypeAlias = Mapping[str, Any]
"""The columns of one row of data, by name: any values, which the user's own functions take."""
BATCH = 1024
"""Rows of a parquet file that are in memory as Python objects at one time."""
SUFFIXES = (".jsonl", ".parquet", ".arrow")


def rows(data: str, split: str, subset: str = "") -> Iterator[tuple[str, Row]]:
    """Yield every row, after the words that say where it stands. Raises `TaskError` for data that cannot be read."""
    path = Path(data)
    if not path.exists():
        yield from ((f"{data}, row {number}", row) for number, row in enumerate(_hub(data, split, subset), start=1))
        return
    for file in _files(path, split) if path.is_dir() else [path]:
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(_file(file), start=1))


def has_splits(data: str) -> bool:
    """Tell if there is a choice of splits: a single file, or one split by `save_to_disk`, has none."""
    path = Path(data)
    return not path.is_file() and not _saved(path)


def _file(path: Path) -> Iterator[Row]:
    match path.suffix:
        case ".jsonl":
            return _jsonl(path)
        case ".parquet":
            return _parquet(path)
        case ".arrow":
            return _arrow(path)
        case suffix:
            raise TaskError(f"{path}: {suffix or 'no suffix'} is not read: use .jsonl or .parquet")


def _files(folder: Path, split: str) -> list[Path]:
    """Find the files of `split`: named after it, or in a folder named after it."""
    found = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    if _saved(folder):
        return [folder / entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
    of_split = [path for path in found if any(_names(part, split) for part in path.relative_to(folder).parts)]
    if not of_split:
        names = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
        raise TaskError(f"{folder}: no file of the split {split!r}; jsonl, parquet and arrow files in it: {names}")
    return of_split


def _saved(folder: Path) -> bool:
    """Tell if the folder was made of one split by `save_to_disk`."""
    return (folder / "state.json").is_file()


def _names(part: str, split: str) -> bool:
    """Tell if a name such as `train`, `train.jsonl` or `train-00000-of-00002.parquet` stands for the split."""
    return part == split or part.startswith((f"{split}.", f"{split}-"))


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield parse(line, f"{path}, line {number}")


def parse(text: bytes, where: str) -> Row:
    """Read one row as JSON. Raises `TaskError`, which begins with `where`, for a text that is no JSON object."""
    try:
        row = json.loads(text)
    except ValueError as error:
        raise TaskError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a row must be an object, this is a {type(row).__name__}")
    return row


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=BATCH):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise TaskError(f"{path}: not a parquet file: {error}") from error


def _arrow(path: Path) -> Iterator[Row]:
    """Read the stream format that `datasets` writes."""
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as source:
            yield from pyarrow.ipc.open_stream(source).read_all().to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise TaskError(f"{path}: not an arrow stream: {error}") from error


def _hub(name: str, split: str, subset: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TaskError(
            f"{name}: no such file or folder; to load it by that name from the hub, pip install 'streamppo[data]'"
        ) from error
    try:
        yield from load_dataset(name, subset or None, split=split)
    # A data set on the hub may bring code of its own, and the way there fails in many ways.
    except Exception as error:
        raise TaskError(f"{name}: neither a file or folder nor loaded from the hub: {error!r}") from error
