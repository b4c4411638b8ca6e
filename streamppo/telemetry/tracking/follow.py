"""Reads metrics.jsonl as it grows: the lines since the last read."""

from pathlib import Path
from typing import NamedTuple

from streamppo.telemetry.metrics_file import Line, Tail, parse

MOST_BYTES = 2**20
"""Approximate bytes of one read, so that a long file is never in memory as a whole."""


class Look(NamedTuple):
    """New lines, and the time of the file's last write, in seconds since 1970."""

    lines: list[Line]
    written_s: float


class ResumedReader:
    """Reads the lines of the run in `folder` from byte `sent` of its file on, without keeping them."""

    def __init__(self, folder: Path, sent: int = 0) -> None:
        self._tail = Tail(folder, sent)

    @property
    def sent(self) -> int:
        """Bytes of the file read so far."""
        return self._tail.end

    def look(self) -> Look:
        """Read the next complete lines and skip damaged ones. A replaced file is read from its beginning."""
        texts = self._tail.read(MOST_BYTES)
        return Look([line for text in texts if (line := parse(text))], self._tail.written_s)
