"""Shows a run to the user: as a live view on a terminal, and as plain log lines elsewhere.

a terminal                                          the view (view.py), drawn at most every `DRAW_S` seconds
a terminal with NO_COLOR                            the view without colours
TERM=dumb, no UTF-8, a pipe, a file, a notebook     a log line every `EVERY_S` seconds
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.text import Text

from streamppo.config.sections import Config
from streamppo.telemetry import host
from streamppo.telemetry.diagnosis import Diagnosis
from streamppo.telemetry.live.screen import Screen, ScreenRow
from streamppo.telemetry.live.state import RunState
from streamppo.telemetry.live.view import final_rows, view
from streamppo.telemetry.metrics_file import Line

EVERY_S = 10.0
DRAW_S, CLOCK_S = 0.5, 1.0
"""Minimum seconds between two drawings: `DRAW_S` if the state has changed, else `CLOCK_S`, for the clock."""
REPORTS_S = 2.0
"""Seconds between two reports of queue and engines for the live view."""
STDOUT = 1

log = logging.getLogger(__name__)


def display(config: Config, folder: Path, diagnosis: Diagnosis | None = None) -> "Display":
    """Return the live view if standard output is a terminal that can show the view, otherwise `PlainLines`."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    if sys.stdout.isatty() and utf8 and os.environ.get("TERM") != "dumb":
        return LiveView(empty_state(config, folder, diagnosis))
    return PlainLines()


def empty_state(config: Config, folder: Path, diagnosis: Diagnosis | None = None) -> RunState:
    """Return the state before the run's first line. The caller must add the run's lines to `diagnosis`."""
    queue = config.queue
    lag_bound = f"{queue.bound}{' in the mean' if queue.admission == 'mean' else ''}"
    return RunState(config.name, str(folder), config.updates, lag_bound, queue.batch_size, diagnosis=diagnosis)


class PlainLines:
    """Logs an update if it is the last, or if `EVERY_S` seconds have passed since the previous line."""

    reports_s = EVERY_S
    """Seconds between two reports of queue and engines."""

    def __init__(self) -> None:
        self._logged_at = time.monotonic()

    def line(self, line: Line) -> None:
        """Do nothing with an event of the run: important events are logged elsewhere."""

    def update(self, text: str, *, is_last: bool) -> None:
        """Show an update, given as a readable line."""
        if is_last or time.monotonic() - self._logged_at > EVERY_S:
            self._logged_at = time.monotonic()
            log.info(text)

    def tick(self, doing: str, wall_s: float) -> None:
        """Do nothing while the driver waits for `doing`, `wall_s` seconds after the start of the run."""

    def say(self, text: str) -> None:
        """Announce at once, from a signal handler, that the run stops."""
        # The signal may have interrupted a write to `sys.stdout`.
        with suppress(OSError):
            os.write(STDOUT, text.encode())

    def close(self) -> None:
        """Stop drawing. Later log lines still appear."""


class LiveView:
    """Draws the view at the bottom of the terminal. After the terminal has closed, logs plain lines."""

    reports_s = REPORTS_S

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._screen = Screen()
        self._plain = PlainLines()
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._warnings = _Warnings(state)
        self._drawn_at, self._memory_read_at = 0.0, 0.0
        self._changed = self._closed = False
        logging.getLogger("streamppo").addHandler(self._warnings)

    def line(self, line: Line) -> None:
        """Add the line to the state, which a later tick shows."""
        self._state.add(line)
        self._changed = True

    def update(self, text: str, *, is_last: bool) -> None:
        """Store the line for a terminal that is too small for the view. Log it if the terminal has closed."""
        self._state.line = text
        if self._closed or self._screen.size() is None:
            self._plain.update(text, is_last=is_last)

    def tick(self, doing: str, wall_s: float) -> None:
        present = time.monotonic()
        wait_s = DRAW_S if self._changed or doing != self._state.doing else CLOCK_S
        if self._closed or present - self._drawn_at < wait_s:
            return
        if present - self._memory_read_at > REPORTS_S:
            self._memory_read_at, self._state.memory = present, host.memory_in_use()
        self._drawn_at, self._changed = present, False
        self._state.doing, self._state.wall_s = doing, wall_s
        if size := self._screen.size():
            self._draw(lambda: view(self._state, size.columns, size.lines))

    def say(self, text: str) -> None:
        """Write `text` above the view. The next drawing tells the user how to end at once."""
        self._state.stopping = self._changed = True
        self._screen.say(text)

    def close(self) -> None:
        """Replace the view by a few rows with the final state, and stop drawing."""
        if self._closed:
            return
        size = self._screen.size()
        if self._screen.has_rows and size:
            self._state.doing = ""
            self._draw(lambda: final_rows(self._state, size.columns))
        self._leave()

    def _leave(self) -> None:
        self._closed = True
        logging.getLogger("streamppo").removeHandler(self._warnings)
        self._screen.leave()

    def _draw(self, lay_out: Callable[[], list[Text]]) -> None:
        try:
            rows = lay_out()
            with self._console.capture() as capture:
                self._console.print(Text("\n").join(rows), soft_wrap=True, end="")
            lines = capture.get().split("\n")
            self._screen.draw([ScreenRow(line, row.cell_len) for line, row in zip(lines, rows, strict=True)])
        except Exception:
            # An error in the view must not end the run.
            self._leave()
            log.exception("the live view has failed; the run continues with plain lines")


Display: TypeAlias = PlainLines | LiveView


class _Warnings(logging.Handler):
    """Stores the first line of the driver's newest warning."""

    def __init__(self, state: RunState) -> None:
        super().__init__(logging.WARNING)
        self._state = state

    def emit(self, record: logging.LogRecord) -> None:
        self._state.warn(record.getMessage().partition("\n")[0])
