"""Writes the rows that a script or notebook passes as `data` to a file, as JSON lines."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from streamppo.errors import TaskError
from streamppo.tasks.columns import plain_columns

ROWS_OF = {
    "DataFrame": "pass data.to_dict('records') of pandas, or data.to_dicts() of polars",
    "Table": "pass data.to_pylist()",
    "DatasetDict": "pass one of its splits",
    "dict": "pass a list with a dict for each row",
}
"""How to get rows from an object of the type with this name."""


def write(data: Iterable[Mapping[str, object]], file: Path) -> None:
    """Write a line for each row. Raises `TaskError`, with the number of the row, for a value that JSON cannot hold."""
    kind = type(data).__name__
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable) or kind in ROWS_OF:
        remedy = ROWS_OF.get(kind, "the name of a file belongs in task.data")
        raise TaskError(f"data: a list of rows is needed, each a dict, not a {kind}: {remedy}")
    count = 0
    with file.open("w", encoding="utf-8") as lines:
        for count, row in enumerate(data, start=1):
            lines.write(_line(row, f"data, row {count}") + "\n")
    if not count:
        raise TaskError("data: no rows")


def _line(row: object, where: str) -> str:
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row must be a mapping, such as a dict, not a {type(row).__name__}")
    columns, omitted = plain_columns(row)
    for name, reason in omitted.items():
        raise TaskError(f"{where}: the column {name!r} {reason}: leave it out")

    def refuse(value: object) -> object:
        raise TaskError(f"{where}: JSON has no {type(value).__name__}: convert it to a text or a number")

    return json.dumps(columns, default=refuse)
