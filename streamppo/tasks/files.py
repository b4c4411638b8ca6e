"""Prompts from jsonl and parquet files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamppo.config import FilesTask
from streamppo.errors import TaskError
from streamppo.types import Prompt


class Files:
    """The rows of one or two files. Raises `TaskError` with file and row for whatever cannot be used."""

    def __init__(self, config: FilesTask, seed: int) -> None:
        self.training: Sequence[Prompt] = _read(Path(config.train), config)
        if config.evaluation is not None:
            self.held_out: Sequence[Prompt] = _read(Path(config.evaluation), config)
            return
        rows = self.training
        order = np.random.default_rng((seed, 0xF11E)).permutation(len(rows))
        cut = round(config.held_out * len(rows))
        self.held_out = [rows[int(i)] for i in order[:cut]]
        self.training = [rows[int(i)] for i in sorted(order[cut:])]
        if not self.training:
            raise TaskError(f"{config.train}: all {len(rows)} rows are held out: lower task.held_out")


def _read(path: Path, config: FilesTask) -> list[Prompt]:
    if not path.is_file():
        raise TaskError(f"{path}: no such file (task.train and task.evaluation name jsonl or parquet files)")
    match path.suffix:
        case ".jsonl":
            rows = _jsonl(path)
        case ".parquet":
            rows = _parquet(path)
        case suffix:
            raise TaskError(f"{path}: {suffix or 'no suffix'} is not read: use .jsonl or .parquet")
    prompts = [_prompt(row, f"{path}, row {number}", config) for number, row in enumerate(rows, start=1)]
    if not prompts:
        raise TaskError(f"{path}: no rows")
    return prompts


def _jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TaskError(f"{path}, line {number}: a row must be an object, this is a {type(row).__name__}")
        yield row


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow.parquet

    try:
        yield from pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise TaskError(f"{path}: not a parquet file: {error}") from error


def _prompt(row: Mapping[str, Any], where: str, config: FilesTask) -> Prompt:
    for column in (config.prompt, config.answer):
        if column not in row:
            raise TaskError(f"{where}: no column {column!r}; columns are {', '.join(map(str, row))}")
    text = row[config.prompt]
    if not isinstance(text, str) or not text:
        raise TaskError(f"{where}: column {config.prompt!r} must be a string that is not empty, not {text!r}")
    columns = {name: value for name, value in row.items() if name not in (config.prompt, config.answer)}
    return Prompt(text=text, columns={**columns, "answer": row[config.answer]})
