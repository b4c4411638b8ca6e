"""metrics.jsonl: one line for whatever happens in a run, as it happens. All that is said of a whole run is made of it.

The first name of a line is its kind (`telemetry.catalogue.LINES`). Every line ends with its newline: one that does not
was cut by a kill or a full disk, and says nothing.
"""

import json
import os
from pathlib import Path
from typing import Any

from streamppo.errors import RunError

METRICS = "metrics.jsonl"

Line = dict[str, Any]


def read(folder: Path) -> list[Line]:
    """What the run in `folder` has written down; nothing if it has no such file.

    Raises `RunError` for a line in which something else stands.
    """
    found: list[Line] = []
    for number, line in enumerate(_whole(folder / METRICS).splitlines(), start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{folder / METRICS}: line {number} is damaged: {error}") from error
    return found


def updates(folder: Path) -> list[Line]:
    """Those of its lines that are updates, in the order of their versions."""
    return [line for line in read(folder) if "update" in line]


def mend(folder: Path) -> None:
    """Remove a last line that was cut, so that the next one does not go on in it."""
    path = folder / METRICS
    if path.exists():
        os.truncate(path, len(_whole(path)))


def _whole(path: Path) -> bytes:
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]
