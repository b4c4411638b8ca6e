"""metrics.jsonl as it grows: the lines that came since the last look."""

import os
from pathlib import Path
from typing import NamedTuple

from streamppo.telemetry import metrics_file
from streamppo.telemetry.metrics_file import Line

MOST_BYTES = 2**20
"""Bytes that one look reads, about, so that a long file is never in memory as a whole."""


class Look(NamedTuple):
    """New lines, and when the file was last written to, in seconds since 1970."""

    lines: list[Line]
    written_s: float


class Follower:
    """The lines of the run in `folder` behind the first `sent` bytes of its file."""

    def __init__(self, folder: Path, sent: int = 0) -> None:
        self._path = folder / metrics_file.METRICS
        self._inode = 0
        self.sent = sent

    def look(self) -> Look:
        """Read the next lines that are whole; damaged ones are left out. A file that was replaced begins anew."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if self._inode not in (0, status.st_ino) or status.st_size < self.sent:
                    self.sent = 0
                self._inode = status.st_ino
                file.seek(self.sent)
                whole = [text for text in file.readlines(MOST_BYTES) if text.endswith(b"\n")]
        except FileNotFoundError:
            return Look([], 0.0)
        self.sent += sum(len(text) for text in whole)
        return Look([line for text in whole if (line := metrics_file.parse(text))], status.st_mtime)
