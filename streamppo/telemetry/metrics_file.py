"""metrics.jsonl: one line for every event of a run, as it happens. All numbers about a whole run are made of it.

The first name of a line is its kind (`telemetry.catalogue.LINES`). Every line ends with its newline: one without it was
cut by a kill or a full disk, and is ignored.
"""

import json
import os
from pathlib import Path
from typing import TypedDict, TypeGuard

from streamppo.errors import RunError
from streamppo.telemetry.catalogue import LINES

METRICS = "metrics.jsonl"


class PartLine(TypedDict):
    """A driver begins."""

    part: int
    wall_s: float
    version: int


class UpdateLine(TypedDict):
    """An update was made. Beside these, the line has every other metric of the catalogue, each a float."""

    update: int
    wall_s: float
    reward: float
    tokens_trained: float
    wait_s: float
    update_s: float
    push_ms: float
    lag_histogram: dict[str, int]


class RedoneLine(TypedDict):
    """An update was made once more."""

    redone: int
    wall_s: float


class EvaluationLine(TypedDict):
    """All actors answered an evaluation; `versions` are the oldest and the newest that they sampled with."""

    evaluation: int
    wall_s: float
    accuracy: float
    count: int
    failed: int
    versions: tuple[int, int]


class RestartLine(TypedDict):
    """A stage died and is started again."""

    restart: str
    wall_s: float
    reason: str


class EndLine(TypedDict):
    """The driver ends."""

    end: str
    wall_s: float


Line = PartLine | UpdateLine | RedoneLine | EvaluationLine | RestartLine | EndLine


def read(folder: Path) -> list[Line]:
    """Read the lines of the run in `folder`; none if it has no such file.

    Raises `RunError` for a line that is not one of these.
    """
    path = folder / METRICS
    return [_parse(line, f"{path}: line {number}") for number, line in enumerate(_whole(path).splitlines(), start=1)]


def updates(folder: Path) -> list[UpdateLine]:
    """Read the lines of updates, in the order of their versions."""
    return [line for line in read(folder) if "update" in line]


def mend(folder: Path) -> None:
    """Remove a last line that was cut, so that the next one does not continue it."""
    path = folder / METRICS
    if path.exists():
        os.truncate(path, len(_whole(path)))


def _parse(line: bytes, place: str) -> Line:
    try:
        content: object = json.loads(line)
    except ValueError as error:
        raise RunError(f"{place} is damaged: {error}") from error
    if not _is_line(content):
        raise RunError(f"{place} is damaged: it is none of {', '.join(LINES)}")
    return content


def _is_line(content: object) -> TypeGuard[Line]:
    return isinstance(content, dict) and next(iter(content), None) in LINES and "wall_s" in content


def _whole(path: Path) -> bytes:
    """Read the file up to its last newline."""
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]
