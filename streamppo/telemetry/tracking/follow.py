"""metrics.jsonl as it grows: the lines that came since the last look."""

from pathlib import Path
from typing import NamedTuple

from streamppo.telemetry.metrics_file import Line, Tail, parse

MOST_BYTES = 2**20
"""Bytes that one look reads, about, so that a long file is never in memory as a whole."""


class Look(NamedTuple):
    """New lines, and when the file was last written to, in seconds since 1970."""

    lines: list[Line]
    written_s: float


class ResumedReader:
    """The lines of the run in `folder` behind the first `sent` bytes of its file; no more of them are kept."""

    def __init__(self, folder: Path, sent: int = 0) -> None:
        self._tail = Tail(folder, sent)

    @property
    def sent(self) -> int:
        """Bytes of the file that were read."""
        return self._tail.end

    def look(self) -> Look:
        """Read the next lines that are whole; damaged ones are left out. A file that was replaced begins anew."""
        texts = self._tail.read(MOST_BYTES)
        return Look([line for text in texts if (line := parse(text))], self._tail.written_s)
