"""A run as people see it while it goes on: the live view on a terminal, plain lines anywhere else.

a terminal                              the view (view.py), drawn at most every `DRAW_S`
NO_COLOR                                the view without colours
TERM=dumb, no UTF-8, a pipe, a file     a line every `EVERY_S`, logged; in a notebook too
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.text import Text

from streamppo.config.sections import Config
from streamppo.telemetry.diagnosis import Diagnosis
from streamppo.telemetry.live import memory
from streamppo.telemetry.live.screen import Screen, ScreenRow
from streamppo.telemetry.live.state import RunState
from streamppo.telemetry.live.view import last, view
from streamppo.telemetry.metrics_file import Line

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""
DRAW_S, CLOCK_S = 0.5, 1.0
"""Seconds between two drawings at least; and at most, while nothing happens but that time passes."""
REPORTS_S = 2.0
"""Seconds between two looks at queue and engines for the view."""
STDOUT = 1

log = logging.getLogger(__name__)


class Display(Protocol):
    """Shows people a run as `Record` tells of it."""

    reports_s: float
    """Seconds between two reports of queue and engines that it asks for."""

    def line(self, line: Line) -> None:
        """Take in an event of the run, as a line of metrics.jsonl tells it."""
        ...

    def update(self, text: str, *, is_last: bool) -> None:
        """Take in one more update, in one line for people."""
        ...

    def tick(self, doing: str, wall_s: float) -> None:
        """Look at the clock, `wall_s` after the run's beginning; `doing` is the driver's reason to wait."""
        ...

    def say(self, text: str) -> None:
        """Write that the run stops, at once, out of a signal handler."""
        ...

    def close(self) -> None:
        """Write nothing more but log lines."""
        ...


def display(config: Config, folder: Path, diagnosis: Diagnosis | None = None) -> Display:
    """Choose by standard output and its environment. A sign that is over in the run's `diagnosis` is shown no more."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    if sys.stdout.isatty() and utf8 and os.environ.get("TERM") != "dumb":
        return LiveView(state_of(config, folder, diagnosis))
    return PlainLines()


def state_of(config: Config, folder: Path, diagnosis: Diagnosis | None = None) -> RunState:
    """Make the state of a run of which nothing is known yet; who feeds the `diagnosis` is its owner."""
    queue = config.queue
    lag_bound = f"{queue.bound}{' in the mean' if queue.admission == 'mean' else ''}"
    return RunState(config.name, str(folder), config.updates, lag_bound, queue.batch_size, diagnosis=diagnosis)


class PlainLines:
    """A line now and then, and one for the last update."""

    reports_s = EVERY_S

    def __init__(self) -> None:
        self._logged_at = time.monotonic()

    def line(self, line: Line) -> None:
        """Show nothing: every event that is for people has a log line."""

    def update(self, text: str, *, is_last: bool) -> None:
        """Log the line if it is the last or the one before is 10 s ago."""
        if is_last or time.monotonic() - self._logged_at > EVERY_S:
            self._logged_at = time.monotonic()
            log.info(text)

    def tick(self, doing: str, wall_s: float) -> None:
        """Show nothing: time alone is no event."""

    def say(self, text: str) -> None:
        """Write to the descriptor: the handler may interrupt the very function that writes to `sys.stdout`."""
        with suppress(OSError):
            os.write(STDOUT, text.encode())

    def close(self) -> None:
        """Leave everything as it is."""


class LiveView:
    """The view at the bottom of the terminal; plain lines once the terminal is gone."""

    reports_s = REPORTS_S

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._screen = Screen()
        self._plain = PlainLines()
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._warnings = _Warnings(state)
        self._drawn_at, self._looked_at = 0.0, 0.0
        self._changed = self._closed = False
        logging.getLogger("streamppo").addHandler(self._warnings)

    def line(self, line: Line) -> None:
        """Take the line in; a later tick shows it."""
        self._state.add(line)
        self._changed = True

    def update(self, text: str, *, is_last: bool) -> None:
        """Keep the line for a terminal that is too small; log it now and then if there is none any more."""
        self._state.line = text
        if self._closed or self._screen.size() is None:
            self._plain.update(text, is_last=is_last)

    def tick(self, doing: str, wall_s: float) -> None:
        """Draw the view if it is time to."""
        present = time.monotonic()
        wait_s = DRAW_S if self._changed or doing != self._state.doing else CLOCK_S
        if self._closed or present - self._drawn_at < wait_s:
            return
        if present - self._looked_at > REPORTS_S:
            self._looked_at, self._state.memory = present, memory.memory_in_use()
        self._drawn_at, self._changed = present, False
        self._state.doing, self._state.wall_s = doing, wall_s
        if size := self._screen.size():
            self._draw(lambda: view(self._state, size.columns, size.lines))

    def say(self, text: str) -> None:
        """Write above the view; the next drawing says how to stop at once."""
        self._state.stopping = self._changed = True
        self._screen.say(text)

    def close(self) -> None:
        """Leave the last state behind, in few rows."""
        if self._closed:
            return
        size = self._screen.size()
        if self._screen.shown and size:
            self._state.doing = ""
            self._draw(lambda: last(self._state, size.columns))
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
            # A fault in a picture ends no run.
            self._leave()
            log.exception("the live view has failed; the run goes on with plain lines")


class _Warnings(logging.Handler):
    """Keeps the newest warning of the driver."""

    def __init__(self, state: RunState) -> None:
        super().__init__(logging.WARNING)
        self._state = state

    def emit(self, record: logging.LogRecord) -> None:
        """Show its first line."""
        self._state.warn(record.getMessage().partition("\n")[0])
