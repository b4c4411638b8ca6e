"""Prints a command's result: rich text on a terminal, plain text to a file or pipe. Log lines go to stderr."""

import json
import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.style import StyleType
from rich.table import Table

from streamppo import process
from streamppo.terminal import harmless, lines

PLAIN_WIDTH = 10_000
"""The width of a line without a terminal. No row is wider, so each row stays one line for grep."""


class _PlainConsole(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record))


class _Console(Console):
    def print(self, *objects: object, **options: Any) -> None:
        """Print as rich does. Without a terminal, the padding of a table's last column is left out."""
        if self.is_terminal:
            return super().print(*objects, **options)
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in captured.get().split("\n")))

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`, which ends the command, because nobody reads its output."""
        raise BrokenPipeError


def echo(*rows: str, result: Path | None = None) -> None:
    """Print each row of a command's result as one line, or an empty line if there are no rows.

    If the command's `result` is a pipe or device, it may be standard output, and rows go to stderr.
    """
    is_result = result is None or result.is_file()
    console(sys.stdout if is_result else sys.stderr).print("\n".join(map(harmless, rows)), soft_wrap=True)


def to_json(value: object, indent: int | None = None) -> bytes:
    """Return JSON for other programs: a number that is not finite is null, and half a surrogate pair is escaped.

    Python's json writes NaN, which is not JSON, and msgspec refuses the half pair.
    """
    plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(plain, indent=indent).encode()


def console(stream: TextIO | None = None) -> Console:
    """Return a console that prints text without markup, to standard output or another stream."""
    width = None if (stream or sys.stdout).isatty() else PLAIN_WIDTH
    return _Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


class _Rows(Table):
    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        shown = (harmless(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*shown, style=style, end_section=end_section)


def table(*columns: str) -> Table:
    """Return a table with these columns. If all names are empty, the table has no headings."""
    return _Rows(*columns, box=None, show_header=any(columns), pad_edge=False, padding=(0, 2, 0, 0))


def print_error(text: str) -> None:
    """Write one message to standard error. Errors of this write are ignored."""
    with suppress(OSError):
        sys.stderr.write(f"streamppo: {lines(text)}\n")


def flush() -> bool:
    """Flush standard output. Returns False if the flush fails, unless the reader of a pipe has ended (`| head`)."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return isinstance(error, BrokenPipeError)
    return True


@contextmanager
def log_to_stderr() -> Generator[None]:
    """During the block, write log lines and the output of scorers to standard error."""
    logger = logging.getLogger("streamppo")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PlainConsole("%(message)s"))
    settings = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        with _stdout_to_stderr(), process.naming_prints(sys.stderr):
            yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = settings


@contextmanager
def _stdout_to_stderr() -> Generator[None]:
    flush()
    saved = -1
    # Standard output or standard error may be closed.
    with suppress(OSError):
        saved = os.dup(1)
        os.dup2(2, 1)
    try:
        yield
    finally:
        if saved >= 0:
            flush()
            os.dup2(saved, 1)
            os.close(saved)
