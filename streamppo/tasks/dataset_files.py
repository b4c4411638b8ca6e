"""Reads the rows of a data set: a file, a folder of files, a folder written by `save_to_disk`, or a name on the hub."""

import codecs
import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from streamppo import durable
from streamppo.errors import TaskError
from streamppo.tasks import files

if TYPE_CHECKING:
    import pyarrow

Row: TypeAlias = Mapping[str, Any]
"""The columns of one row of data, by name; values may have any type."""
QUOTED = 200
"""Maximum number of characters of a row's value that an error quotes."""
BATCH = 1024
"""Number of rows of a parquet file that are Python objects in memory at a time."""


class Unreadable(NamedTuple):
    """Replaces a value of a row that cannot be read; `reason` says why."""

    reason: str


def rows(data: str, split: str, subset: str = "") -> Iterator[tuple[str, Row]]:
    """Yield (location, row) for every row. Raises `TaskError` for data that cannot be read."""
    path = Path(data)
    if not path.exists():
        if not may_be_hub_name(data):
            raise TaskError(f"{data}: no such file or folder (looked at {path.absolute()})")
        yield from ((f"{data}, row {number}", row) for number, row in enumerate(_hub(data, split, subset), start=1))
        return
    for file in files.find(path, split).of_split if path.is_dir() else [path]:
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(_file(file), start=1))


def may_be_hub_name(name: str) -> bool:
    """Return True for "name" and "owner/name", which begin with a letter or digit, unless it is a data file."""
    is_path = name.count("/") > 1 or not name[:1].isalnum() or name.endswith("/")
    return not is_path and not files.ending(Path(name)) and not files.UNSUPPORTED.search(name)


def subset_folder(data: str, subset: str, *, is_required: bool) -> str:
    """Return the folder of `subset` in `data`, or a hub name as it is. Raises `TaskError` if a folder is missing."""
    path = Path(data)
    if not subset or not path.exists():
        return data
    if (path / subset).is_dir():
        return str(path / subset)
    if not is_required:
        return data
    if path.is_file():
        raise TaskError(f"{data}: a single file has no subset {subset!r}: leave that out")
    names = ", ".join(sorted(inner.name for inner in path.iterdir() if inner.is_dir())) or "none"
    raise TaskError(f"{data}: no folder of the subset {subset!r}; folders in it: {names}")


def has_splits(data: str) -> bool:
    """Return True unless `data` is a single file, or a `save_to_disk` folder of one split."""
    path = Path(data)
    return not path.is_file() and not files.is_saved_dataset(path)


def _file(path: Path) -> Iterator[Row]:
    if path.exists() and not path.is_file():
        raise TaskError(
            f"{path}: not a file: a pipe or a device can be read only once, and a run reads its data several times"
        )
    with suppress(OSError):
        if durable.is_pointer(path):
            raise TaskError(f"{path}: {durable.POINTER}")
    match files.ending(path):
        case ".jsonl" | ".jsonl.gz":
            return _jsonl(path, "each line of the file must be one JSON object in UTF-8")
        case ".json" | ".json.gz":
            return _json(path)
        case ".parquet":
            return _parquet(path)
        case ".arrow":
            return _arrow(path)
        case ".csv" | ".csv.gz":
            return _csv(path, ",")
        case ".tsv" | ".tsv.gz":
            return _csv(path, "\t")
        case _:
            raise TaskError(
                f"{path}: {path.suffix or 'no suffix'} is not supported: use .jsonl, .json, .csv, .parquet or .jsonl.gz"
            )


def _jsonl(path: Path, form: str) -> Iterator[Row]:
    for number, line in enumerate(_text_lines(path), start=1):
        if line.strip():
            try:
                yield parse(line, f"{path}, line {number}")
            except TaskError as error:
                raise TaskError(f"{error}; {form}") from error


def _json(path: Path) -> Iterator[Row]:
    """Read a list of objects or, as `datasets` does, one object in each line."""
    begin = next((text for line in _text_lines(path) if (text := line.strip())), b"")
    if not begin.startswith(b"["):
        yield from _jsonl(path, f"{path.name} must be a list of objects, or one object in each line, in UTF-8")
        return
    try:
        items = json.loads(b"".join(_text_lines(path)))
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: not JSON: {error}") from error
    for number, item in enumerate(items, start=1):
        yield _object(item, f"{path}, row {number}")


def _text_lines(path: Path) -> Iterator[bytes]:
    for number, line in enumerate(_lines(path)):
        yield line if number else line.removeprefix(codecs.BOM_UTF8)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            yield from lines
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TaskError(f"{path}: not a complete gzip file: {error}") from error
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse(text: bytes, where: str) -> Row:
    """Parse one row from JSON. Raises `TaskError`, whose message begins with `where`, unless the row is an object."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: not JSON: {error}") from error
    return _object(row, where)


def _object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a row must be an object, this is a {type(row).__name__}")
    return cast("Row", row)


def _csv(path: Path, delimiter: str) -> Iterator[Row]:
    """Read a table with a header. An empty value is None, as in pandas. Columns without a name are left out."""
    csv.field_size_limit(sys.maxsize)
    table = csv.reader(_decode_lines(path), delimiter=delimiter, strict=True)
    try:
        names = next(table, [])
        if duplicates := _duplicates(names):
            raise TaskError(f"{path}: the first line must name the columns, and it has {duplicates} twice")
        for values in table:
            if not values:
                continue
            if len(values) != len(names):
                raise TaskError(f"{path}, line {table.line_num}: {len(values)} values for {len(names)} columns")
            yield {name: value or None for name, value in zip(names, values, strict=True) if name}
    except csv.Error as error:
        raise TaskError(f"{path}, line {table.line_num}: not CSV: {error}") from error


def _decode_lines(path: Path) -> Iterator[str]:
    encoding = "utf-8-sig"
    for number, line in enumerate(_lines(path), start=1):
        try:
            yield line.decode(encoding)
        except UnicodeDecodeError as error:
            raise TaskError(f"{path}, line {number}: not UTF-8: {error.reason}; save the file as UTF-8") from error
        encoding = "utf-8"


def _duplicates(names: list[str]) -> str:
    return ", ".join(repr(name) for name in dict.fromkeys(names) if names.count(name) > 1)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=BATCH):
                yield from _rows(batch, path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise TaskError(f"{path}: not a parquet file: {error}") from error


def _arrow(path: Path) -> Iterator[Row]:
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                yield from _rows(batch, path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise TaskError(f"{path}: not an arrow stream: {error}") from error


def _rows(batch: "pyarrow.RecordBatch", where: Path) -> Iterator[Row]:
    """Yield the rows of a batch. A column with a value that Python cannot represent is `Unreadable` in each row."""
    import pyarrow

    names: list[str] = batch.schema.names
    if duplicates := _duplicates(names):
        raise TaskError(f"{where}: more than one column is named {duplicates}")
    columns: list[list[Any]] = []
    for column in batch.columns:
        try:
            kind = _in_microseconds(column.type)
            column_values = column.cast(kind, safe=False).to_pylist()
            columns.append([_parse_json(value, kind) for value in column_values] if _has_json(kind) else column_values)
        # Python lacks dates beyond the year 9999, texts that are not UTF-8, duplicate field names, and some types.
        except (
            pyarrow.ArrowException,
            ValueError,
            RecursionError,
            OverflowError,
            TypeError,
            NotImplementedError,
        ) as error:
            columns.append([Unreadable(f"holds values of {column.type} that cannot be read: {error}")] * len(column))
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _has_json(kind: "pyarrow.DataType") -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(_has_json(field.type) for field in kind)
    return _has_json(kind.value_type) if _is_list(kind) else isinstance(kind, pa.JsonType)


def _is_list(kind: "pyarrow.DataType") -> bool:
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _parse_json(value: Any, kind: "pyarrow.DataType") -> Any:
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _parse_json(value[field.name], field.type) for field in kind}
    if _is_list(kind):
        return [_parse_json(item, kind.value_type) for item in value]
    return json.loads(value) if isinstance(kind, pa.JsonType) else value


def _in_microseconds(kind: "pyarrow.DataType") -> "pyarrow.DataType":
    """Replace nanoseconds in a type by microseconds: Python's datetime has no nanoseconds."""
    import pyarrow as pa

    types = pa.types
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_struct(kind):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    for is_list, make in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_list(kind):
            return make(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    return kind


def _hub(name: str, split: str, subset: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise TaskError(
            f"{name}: no such file or folder; to load it by that name from the hub, pip install 'streamppo[data]'"
        ) from error
    try:
        loaded: Any = load_dataset(name, subset or None, split=split)
        yield from loaded
    # A hub data set may run its own code, and a download may fail with any exception.
    except Exception as error:
        raise TaskError(f"{name}: not a file or folder, and not loaded from the hub: {error!r}") from error
