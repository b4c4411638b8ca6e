"""How a process of ours behaves: when Python looks for reference cycles in it, where its output and its time go.

Cycles: a trajectory that waits a second for its reward survives the cheap passes, and so Python makes a full one every
second. It walks every object there is, 0.3 s beside torch and transformers, and nothing else happens meanwhile. Nothing
that a trajectory consists of makes cycles.

Log lines: every module logs to `logging.getLogger(__name__)`; each process of ours calls `log_to_stdout` once. A
warning begins with that word, and on a terminal a line is broken between words. Ray
brings an actor's standard output to the driver's, which may lose its reader (`| head`, a terminal that is closed): the
rest then goes to a file, and the run goes on. What an actor logs begins with the secret in `MARK` there: the driver
takes that away, and writes `PRINTS` before every other line of an actor's, which rewards and environments print. Where
such code runs in the process of a command, `naming_prints` does the same.

Phases: calls, wall seconds and CPU seconds of each phase of its work since its start. Reports carry them to the driver,
and metrics.jsonl keeps them (`telemetry/catalogue.py` names every phase). Phases do not contain each other.
"""

import ctypes
import gc
import io
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import ContextDecorator, contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TextIO

from streamppo.terminal import HANGING, harmless, lines

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MARK = "STREAMPPO_LOG_MARK"
"""The variable of actors with the driver's secret: a line of text that a policy wrote cannot begin with it."""
PRINTS = "prints: "
"""Before a line that somebody else than our log prints in an actor."""
LINE_BYTES = 8 * 2**10
"""A longer line that is printed is shown as several."""
PR_SET_PDEATHSIG = 1
"""The option of prctl(2): a signal for this process when the thread that made it ends."""
MORE_OBJECTS = 200_000
"""A pass comes when so many objects more are alive than at the last one: tens of MiB that cycles may hold."""

WHOLE = "process"
"""The phase that is the process itself, with all of its threads."""


def freeze_gc() -> None:
    """Freeze what is loaded, so that it is never walked again, and let the rest grow before it is.

    To be called once everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MORE_OBJECTS)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal when the parent's thread that made this process ends. Linux alone knows how."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def take_any_text() -> None:
    """Let this process print what its encoding does not have, half a pair of surrogates too, as an escape."""
    for stream in (sys.stdout, sys.stderr):
        # A stream that somebody has replaced may know no errors.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def log_to_stdout(who: str = "") -> None:
    """Write the package's log lines to standard output, each behind `who: ` where it is given. Again: no change."""
    take_any_text()
    ours = logging.getLogger("streamppo")
    if any(isinstance(handler, _Lines) for handler in ours.handlers):
        return
    handler = _Lines(os.environ.get(MARK, "") if who else "")
    handler.setFormatter(_Named(f"{who}: " if who else ""))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


@contextmanager
def lasting_output(path: Path) -> Generator[None]:
    """In the block, let standard output and standard error go on to the file `path` once their readers go away.

    Everything that Python writes is meant, lines that Ray's threads print too.
    """
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        # A stream that somebody has replaced is theirs.
        if stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Lasting(stream.fileno(), path))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class _Lasting(io.FileIO):
    """A descriptor that is led to a file by the first write that is refused."""

    def __init__(self, descriptor: int, path: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._path = path

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write to the reader, or to the file if there is no reader any more."""
        try:
            return super().write(data)
        except OSError:
            self._path.parent.mkdir(exist_ok=True)
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, self.fileno())
            os.close(file)
            return super().write(data)


@contextmanager
def naming_prints(to: TextIO | None = None) -> Generator[None]:
    """In the block, make harmless what other people's code prints in this process, and write `PRINTS` before each line.

    Its lines go where they went, or all of them `to` one stream; those of our log stay as they are. What keeps one of
    the streams writes to it in the same way after the block.
    """
    before = sys.stdout, sys.stderr
    if isinstance(sys.stdout, _Prints):
        yield
        return
    named = [_Prints(to or stream) for stream in before]
    sys.stdout, sys.stderr = named
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in named:
            stream.end_line()


class _Prints(io.TextIOWrapper):
    """Stands for the stream `under` it, which gets whole lines."""

    def __init__(self, under: TextIO) -> None:
        self.under = under
        self._lines = _PrintedLines(under)
        super().__init__(io.BufferedWriter(self._lines), "utf-8", "backslashreplace", line_buffering=True)

    def end_line(self) -> None:
        """Write what has no newline yet."""
        # Whoever printed may have closed it.
        with suppress(ValueError):
            self.flush()
        self._lines.end()


class _PrintedLines(io.RawIOBase):
    """Hands lines on, each harmless and behind `PRINTS`."""

    def __init__(self, to: TextIO) -> None:
        self._to, self._rest = to, b""

    def writable(self) -> bool:
        """It is written to."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the stream, for processes that are started with it."""
        return self._to.fileno()

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write the lines that are whole."""
        *whole, self._rest = (self._rest + bytes(data)).split(b"\n")
        while len(self._rest) > LINE_BYTES:
            whole, self._rest = [*whole, self._rest[:LINE_BYTES]], self._rest[LINE_BYTES:]
        rows = (line.removesuffix(b"\r").decode(errors="replace") for line in whole)
        self._to.write("".join(f"{PRINTS}{harmless(row)}\n" for row in rows))
        self._to.flush()
        return len(bytes(data))

    def end(self) -> None:
        """Write the line that is not whole."""
        if self._rest:
            line, self._rest = self._rest + b"\n", b""
            _PrintedLines(self._to).write(line)


def _own_stream() -> TextIO:
    """Return the standard output of this moment, for lines of ours."""
    return sys.stdout.under if isinstance(sys.stdout, _Prints) else sys.stdout


class _Named(logging.Formatter):
    """The message behind `head`, and behind the name of its level from a warning on."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self._head = head

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Write the first line."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._head}{level}{record.message}"


class _Lines(logging.Handler):
    """One line for each record, on the standard output of this moment; each row of it behind `mark`."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark = mark

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line; a reader that went away stops nothing."""
        try:
            rows = wrap(lines(self.format(record)), _columns()).split("\n")
            stream = _own_stream()
            stream.write("".join(f"{self._mark}{row}\n" for row in rows))
            stream.flush()
        except OSError:
            self.handleError(record)


def with_origin(line: str, mark: str) -> str:
    """Make a line of an actor's output harmless: as it is if our log wrote it, behind `PRINTS` if anybody else did.

    Example: mark "5e1f", "5e1fqueue: opened" -> "queue: opened", "queue: opened" -> "prints: queue: opened".
    """
    return harmless(line.removeprefix(mark)) if mark and line.startswith(mark) else f"{PRINTS}{harmless(line)}"


ESCAPE = re.compile(r"\033\[[0-9;]*[A-Za-z]")
"""A colour, or another order to the terminal, which takes no cell."""


def wrap(text: str, columns: int) -> str:
    """Break each line of `text` that has more cells than `columns` between words; 0 columns break none.

    A word that is wider than a row stays whole: the terminal breaks it, and it can be copied.
    """
    return "\n".join(_wrapped(line, columns) for line in text.split("\n")) if columns else text


def _wrapped(line: str, columns: int) -> str:
    # A line that goes back to its beginning is a picture of somebody's progress.
    if (len(line) <= columns and line.isascii()) or "\r" in line:
        return line
    # Slow to import, and most lines are short.
    from rich.cells import cell_len

    if cell_len(ESCAPE.sub("", line)) <= columns:
        return line
    rows, room = [""], columns
    for word in re.split(r"(?<=\S)(?= )", line):
        cells = cell_len(ESCAPE.sub("", word))
        if cells <= room or rows == [""]:
            rows[-1] += word
            room -= cells
        else:
            rows.append(HANGING + word.lstrip(" "))
            room = columns - cell_len(ESCAPE.sub("", rows[-1]))
    return "\n".join(rows)


def _columns() -> int:
    """Columns of the terminal behind standard output; 0 if there is none."""
    try:
        stream = _own_stream()
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError, AttributeError):
        return 0


# --- phases ----------------------------------------------------------------------------------------------------------


class PhaseTime(NamedTuple):
    """Time of a phase. `cpu_s` is of the threads that were in it alone, not of helpers that they wait for."""

    calls: int
    wall_s: float
    cpu_s: float


_STARTED = time.perf_counter()
_spent: dict[str, PhaseTime] = {}
_lock = Lock()


class phase(ContextDecorator):
    """Count the block, or every call of the function, as `name`. For a block that awaits there is `add`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _recreate_cm(self) -> "phase":
        """Several threads may be in one function."""
        return phase(self._name)

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        add(self._name, time.perf_counter() - self._wall, time.thread_time() - self._cpu)


def add(name: str, wall_s: float, cpu_s: float = 0.0) -> None:
    """Count one more call of a phase. A phase that awaits has no CPU time of its own: others run meanwhile."""
    with _lock:
        calls, wall, cpu = _spent.get(name, (0, 0.0, 0.0))
        _spent[name] = PhaseTime(calls + 1, wall + wall_s, cpu + cpu_s)


def spent() -> dict[str, PhaseTime]:
    """Return the time of every phase of this process since its start, and of the process as a whole."""
    with _lock:
        return {**_spent, WHOLE: PhaseTime(1, time.perf_counter() - _STARTED, time.process_time())}


def sum_phases(processes: Iterable[Mapping[str, PhaseTime]]) -> dict[str, PhaseTime]:
    """Add up what several processes have `spent`."""
    found: dict[str, list[PhaseTime]] = {}
    for one in processes:
        for name, time_of in one.items():
            found.setdefault(name, []).append(time_of)
    return {name: PhaseTime(*map(sum, zip(*times, strict=True))) for name, times in found.items()}
