"""How far a run is, in one line: rewritten in its place on a terminal, logged now and then anywhere else."""

import logging
import os
import sys
import time
from contextlib import suppress

from streamppo.process import CLEAR_LINE

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""

log = logging.getLogger(__name__)


class LiveLine:
    """The newest state of a run. Log lines appear above it (`process.log_to_stdout`)."""

    def __init__(self) -> None:
        self._shown = False
        self._logged_at = time.monotonic()

    def show(self, text: str, *, last: bool) -> None:
        """Replace the line by `text`. Without a terminal, log it if it is the last or the one before is 10 s ago."""
        # A terminal may be closed while the run goes on.
        if sys.stdout.isatty():
            self._write(CLEAR_LINE + _cut(text))
            self._shown = True
        elif last or time.monotonic() - self._logged_at > EVERY_S:
            self._logged_at = time.monotonic()
            log.info(text)

    def close(self) -> None:
        """Leave the line as it is; a later one begins below it."""
        if self._shown:
            self._write("\n")
        self._shown = False

    def _write(self, text: str) -> None:
        # A terminal that went away stops no run.
        with suppress(OSError):
            sys.stdout.write(text)
            sys.stdout.flush()


def _cut(text: str) -> str:
    """Cut `text` to the terminal's width: a line that wraps would leave its beginning behind at every update."""
    columns = os.get_terminal_size(sys.stdout.fileno()).columns
    return text[: columns - 1] if columns else text
