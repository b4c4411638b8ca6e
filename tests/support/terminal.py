"""A pseudo-terminal of any size as standard output, and the rows that a terminal would show."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress


@contextmanager
def terminal(columns: int = 40, rows: int = 24) -> Iterator[int]:
    """Make standard output a terminal during the block; yields the descriptor of its other end."""
    reader, writer = pty.openpty()
    resize(writer, columns, rows)
    stdout = os.fdopen(writer, "w")
    try:
        # Inside the test: pytest replaces standard output between a fixture and its test.
        with redirect_stdout(stdout):
            yield reader
    finally:
        # A test may have closed the other end with output still buffered.
        for close in (stdout.close, lambda: os.close(reader)):
            with suppress(OSError):
                close()


def resize(descriptor: int, columns: int, rows: int = 24) -> None:
    """Change the size of a terminal."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def written(reader: int) -> str:
    """Everything that was written, read until 0.5 s pass without output."""
    text = b""
    while select.select([reader], [], [], 0.5)[0]:
        text += os.read(reader, 10_000)
    return text.decode()


def shown(text: str, columns: int) -> list[str]:
    """The rows of an infinitely high terminal after `text`. Raises ValueError for escape sequences not used by ours."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif re.fullmatch(r"\x1b\[[0-9]+A", part):
            row = max(0, row - int(part[2:-1]))
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        elif part == "\x1b[J":
            rows[row], rows[row + 1 :] = rows[row][:column], []
        elif re.fullmatch(r"\x1b\[[0-9;]*m", part):
            continue
        elif part.startswith("\x1b"):
            raise ValueError(f"another sequence: {part!r}")
        else:
            if column == columns:
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in rows]
