"""Redraws rows at the bottom of a terminal in place, while all other output scrolls above them.

    printed lines     inserted above the rows; later they scroll up like other output of the terminal
    row 1 .. row n    drawn in one write; the cursor stays after the last row

While rows are shown, `sys.stdout` and `sys.stderr` are replaced, because Ray prints its actors' lines from another
thread. Printing a line is cheap: the line is wrapped, and the rows are written again unchanged.
"""

import io
import os
import sys
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, local
from typing import NamedTuple, TextIO

from streamppo.terminal import wrap

ERASE_LINE, ERASE_BELOW = "\033[K", "\033[J"


class ScreenRow(NamedTuple):
    """One row as it is written to the terminal, and its width in cells."""

    text: str
    cells: int


class Screen:
    """The rows on the terminal at `sys.stdout`. Before the first `draw` there are no rows."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rows: Sequence[ScreenRow] = ()
        self._postponed: deque[str] = deque()
        self._replaced: dict[str, tuple[TextIO, StreamAbove]] = {}

    @property
    def has_rows(self) -> bool:
        return bool(self._rows)

    @property
    def terminal(self) -> TextIO:
        return self._replaced["stdout"][0] if "stdout" in self._replaced else sys.stdout

    def size(self) -> os.terminal_size | None:
        """Return the columns and rows of the terminal, 0 for unknown numbers; None if the output is not a terminal."""
        try:
            return os.get_terminal_size(self.terminal.fileno()) if self.terminal.isatty() else None
        except (OSError, ValueError):
            return None

    def draw(self, rows: Sequence[ScreenRow]) -> None:
        self._replace_streams()
        with self._locked():
            erase, self._rows = self._to_first_row(), rows
            self._write(erase + self._drawn())

    def write_above(self, text: str) -> None:
        """Write complete lines above the rows, wrapped between words."""
        size = self.size()
        with self._locked():
            self._write(self._with(wrap(text, size.columns if size else 0)))

    def say(self, text: str) -> None:
        """Write complete lines above the rows from a signal handler; the function with the lock writes them later."""
        if not self._lock.acquire(blocking=False):
            self._postponed.append(text)
            return
        try:
            with suppress(OSError, ValueError):
                os.write(self.terminal.fileno(), self._with(text).encode(errors="replace"))
        finally:
            self._lock.release()

    def leave(self) -> None:
        """Restore the original streams. The rows stay on the screen, and later output appears below them."""
        for _, replacement in self._replaced.values():
            replacement.finish()
        with self._locked():
            if self._rows:
                self._write("\n")
            self._rows = ()
        for name, (stream, replacement) in self._replaced.items():
            if getattr(sys, name) is replacement:
                setattr(sys, name, stream)
        self._replaced = {}

    def _replace_streams(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            # A stream that is redirected to a file is not replaced.
            if name not in self._replaced and stream.isatty():
                replacement = StreamAbove(stream, self)
                self._replaced[name] = stream, replacement
                setattr(sys, name, replacement)

    @contextmanager
    def _locked(self) -> Generator[None]:
        with self._lock:
            yield
            while self._postponed:
                self._write(self._with(self._postponed.popleft()))

    def _write(self, text: str) -> None:
        # A closed terminal must not stop the run.
        with suppress(OSError, ValueError):
            self.terminal.write(text)
            self.terminal.flush()

    def _with(self, text: str) -> str:
        """Return the characters that print `text` above the rows."""
        return f"{self._to_first_row()}{ERASE_BELOW if self._rows else ''}{text}{self._drawn()}"

    def _to_first_row(self) -> str:
        """Return the characters that move the cursor to the first row, even if a narrower terminal has wrapped rows."""
        if not self._rows:
            return ""
        size = self.size()
        columns = (size.columns if size else 0) or sys.maxsize
        up = sum(max(1, -(-row.cells // columns)) for row in self._rows) - 1
        narrowed = any(row.cells >= columns for row in self._rows)
        return "\r" + (f"\033[{up}A" if up else "") + (ERASE_BELOW if narrowed else "")

    def _drawn(self) -> str:
        if not self._rows:
            return ""
        return "\n".join(row.text + ERASE_LINE for row in self._rows) + ERASE_BELOW


class StreamAbove(io.TextIOBase):
    """Replaces stdout or stderr: complete lines appear above the rows. The pieces of a line are buffered by thread."""

    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self._stream, self._screen = stream, screen
        self._partial = local()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._stream.encoding

    def write(self, text: str, /) -> int:
        """Write the complete lines, and buffer the text after the last newline."""
        complete, newline, incomplete = (getattr(self._partial, "text", "") + text).rpartition("\n")
        self._partial.text = incomplete
        if newline:
            self._screen.write_above(complete + newline)
        return len(text)

    def finish(self) -> None:
        """Write the line that this thread has buffered, if there is one."""
        if getattr(self._partial, "text", ""):
            self.write("\n")

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
