"""Settings of streamppo's processes: garbage collection, log output, and the time of their phases.

Garbage collection: a trajectory lives for about a second until its reward arrives, so it survives the cheap passes.
Python would then make a full pass every second. A full pass visits every object, which takes 0.3 s in a process that
has loaded torch and transformers. Full passes can be rare because a trajectory's objects form no cycles. The import of
torch, transformers and Ray takes 8.5 s of CPU, and 7.4 s in `without_gc`.

Log lines: every module logs to `logging.getLogger(__name__)`, and each process calls `log_to_stdout`. Ray forwards
an actor's standard output to the driver's. Each line of an actor's log begins with a secret (`MARK`), which the driver
removes. A line without the secret was printed by user code, such as a reward. The driver puts `PRINTS` before it.

Compiled kernels: a process on a GPU stores them in ~/.cache/streamppo for later processes and runs.

Phases: each process counts the calls, wall seconds and CPU seconds of each phase since its start. It reports them to
the driver, which writes them to metrics.jsonl (`telemetry/catalogue.py` names the phases). Phases are not nested.
"""

import ctypes
import fcntl
import gc
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import ContextDecorator, contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TextIO

from streamppo.terminal import harmless, lines, wrap

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MARK = "STREAMPPO_LOG_MARK"
"""The environment variable of actors with the driver's secret. A printed line without the secret is not a log line."""
PRINTS = "prints: "
"""Prefix of an output line that a user's code has printed."""
LINE_BYTES = 8 * 2**10
"""Longer printed lines are split into lines of this size."""
PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that sends a signal to this process when the thread that created it ends."""
MORE_OBJECTS = 200_000
"""Growth in live objects that triggers a garbage collection. Less frequent collections let garbage use tens of MiB."""
CACHES = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "CUTE_DSL_CACHE_DIR": "cutlass",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""For each library: the environment variable for its folder of compiled kernels, and the folder's name in our cache."""
FLASH_KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""The variable that makes flash-attn 4 store compiled kernels. Without it every process compiles them again."""

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command or a run: Ctrl-C, a request to stop, and a closed terminal."""
WHOLE = "process"
"""The name of the phase that covers the whole process with all its threads."""


@contextmanager
def without_gc() -> Generator[None]:
    """Switch garbage collection off while the block imports libraries, and exclude their objects from later passes."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_gc() -> None:
    """Exclude all present objects from garbage collection, and make passes over later objects rare.

    A process calls it after it has loaded everything.
    """
    gc.collect()
    gc.freeze()
    make_gc_rare()


def make_gc_rare() -> None:
    """Collect garbage after every `MORE_OBJECTS` new objects; Python's 700 cost a fifth of the imports' time."""
    gc.set_threshold(MORE_OBJECTS)


def netloc(host: str, port: int) -> str:
    """Return "host:port" as in a URL, where an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def compile_caches() -> dict[str, str]:
    """Return the environment variables that make a GPU process store compiled kernels, except those the user has set.

    The variables must be set before the libraries are imported. Returns {} if the cache folder belongs to another user,
    or its disk has no locks: flash-attn would wait 15 s for a lock and fail.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamppo"
    if fault := _unusable(base):
        log.info("compiled kernels are not kept for the next run: %s: %s", base, fault)
        return {}
    variables = {FLASH_KEEPS: "1"} | {name: str(base / folder) for name, folder in CACHES.items()}
    return {name: value for name, value in variables.items() if name not in os.environ}


def _unusable(folder: Path) -> str:
    """Return the reason why compiled kernels cannot be stored in `folder`; "" if they can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Kernels are code. A user who can write to the folder could run code in this process.
        if folder.stat().st_uid != os.getuid():
            return "another user's"
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Make the kernel signal this process when the parent thread that created it ends. Works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def open_closed_streams() -> None:
    """Open the null device for each closed standard stream (`>&-`); else the next file would get its number."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(descriptor)
        except OSError:
            # The operating system returns the lowest free descriptor: this one, because the lower ones are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        stream = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
        for alias in (name, f"__{name}__"):
            setattr(sys, alias, stream)


def escape_unprintable() -> None:
    """Print characters that the output's encoding lacks, such as unpaired surrogates, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        # A replaced stream may have no `reconfigure`.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def log_to_stdout(who: str = "") -> None:
    """Write the package's log lines to standard output, after "`who`: " if given. A repeated call changes the name."""
    escape_unprintable()
    ours = logging.getLogger("streamppo")
    handler = next((handler for handler in ours.handlers if isinstance(handler, _Lines)), None)
    if handler is None:
        handler = _Lines(os.environ.get(MARK, "") if who else "")
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False
    handler.setFormatter(_Named(f"{who}: " if who else ""))


@contextmanager
def lasting_output(path: Path) -> Generator[None]:
    """In the block, if the reader of standard output or standard error ends, redirect that stream to the file `path`.

    The redirection covers everything that Python writes, including lines that Ray's threads print.
    """
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        # A stream that the caller has replaced is left alone.
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
    """A descriptor that is redirected to a file as soon as a write to it fails."""

    def __init__(self, descriptor: int, path: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._path = path

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write to the reader, or to the file if the reader has ended."""
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
    """In the block, make the lines that user code prints harmless, and write `PRINTS` before each of them.

    The lines go to the stream `to`; by default to the stream that was printed to. The package's log lines are
    unchanged. If user code stores a stream, what it prints there after the block is treated in the same way.
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
    """Replaces the stream `under`, and passes complete lines on to it."""

    def __init__(self, under: TextIO) -> None:
        self.under = under
        self._lines = _PrintedLines(under)
        super().__init__(io.BufferedWriter(self._lines), "utf-8", "backslashreplace", line_buffering=True)

    def end_line(self) -> None:
        """Write the incomplete last line."""
        # User code may have closed the stream.
        with suppress(ValueError):
            self.flush()
        self._lines.end()


class _PrintedLines(io.RawIOBase):
    """Writes each line to the stream `to`, made harmless and prefixed with `PRINTS`."""

    def __init__(self, to: TextIO) -> None:
        self._to, self._incomplete = to, b""

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the stream's descriptor. Child processes that get this stream inherit it."""
        return self._to.fileno()

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write the complete lines."""
        *complete, self._incomplete = (self._incomplete + bytes(data)).split(b"\n")
        while len(self._incomplete) > LINE_BYTES:
            complete, self._incomplete = [*complete, self._incomplete[:LINE_BYTES]], self._incomplete[LINE_BYTES:]
        rows = (line.removesuffix(b"\r").decode(errors="replace") for line in complete)
        self._to.write("".join(f"{PRINTS}{harmless(row)}\n" for row in rows))
        self._to.flush()
        return len(bytes(data))

    def end(self) -> None:
        """Write the incomplete line."""
        if self._incomplete:
            line, self._incomplete = self._incomplete + b"\n", b""
            _PrintedLines(self._to).write(line)


def _own_stream() -> TextIO:
    """Return the stream for the package's log lines: standard output, without `_Prints` around it."""
    return sys.stdout.under if isinstance(sys.stdout, _Prints) else sys.stdout


class _Named(logging.Formatter):
    """Formats a message: `head`, the level of a warning or error, and the text."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self._head = head

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the message without its traceback."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._head}{level}{record.message}"


class _Lines(logging.Handler):
    """Writes each record to the current `sys.stdout`, with `mark` at the beginning of each line."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark = mark

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record. If the reader has ended, the process continues."""
        try:
            rows = wrap(lines(self.format(record)), _columns()).split("\n")
            stream = _own_stream()
            stream.write("".join(f"{self._mark}{row}\n" for row in rows))
            stream.flush()
        except OSError:
            self.handleError(record)


def with_origin(line: str, mark: str) -> str:
    """Remove `mark` from a log line of an actor, and put `PRINTS` before any other line; make both harmless.

    Example: mark "5e1f", "5e1fqueue: opened" -> "queue: opened", "queue: opened" -> "prints: queue: opened".
    """
    return harmless(line.removeprefix(mark)) if mark and line.startswith(mark) else f"{PRINTS}{harmless(line)}"


def _columns() -> int:
    """Return the width of the terminal at standard output in columns; 0 if it is not a terminal."""
    try:
        stream = _own_stream()
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError, AttributeError):
        return 0


# --- phases ----------------------------------------------------------------------------------------------------------


class PhaseTime(NamedTuple):
    """Calls, wall seconds and CPU seconds of a phase. `cpu_s` excludes helper threads for which the phase waits."""

    calls: int
    wall_s: float
    cpu_s: float


_spent: dict[str, PhaseTime] = {}
_started_at = [time.perf_counter()]
_lock = Lock()


def _start() -> None:
    """Forget the phases and the age of the parent, in a fork: Ray's workers are forks."""
    _spent.clear()
    _started_at[:] = [time.perf_counter()]


os.register_at_fork(after_in_child=_start)


class phase(ContextDecorator):
    """A context manager and decorator that adds the time of the block, or of each call, to the phase `name`.

    A block that awaits calls `add` instead.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _recreate_cm(self) -> "phase":
        """Return a new object for each call, because several threads may be in the decorated function."""
        return phase(self._name)

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        add(self._name, time.perf_counter() - self._wall, time.thread_time() - self._cpu)


def add(name: str, wall_s: float, cpu_s: float = 0.0) -> None:
    """Add one call to a phase. A phase that awaits leaves `cpu_s` at 0: its thread runs other tasks meanwhile."""
    with _lock:
        calls, wall, cpu = _spent.get(name, (0, 0.0, 0.0))
        _spent[name] = PhaseTime(calls + 1, wall + wall_s, cpu + cpu_s)


def phase_times() -> dict[str, PhaseTime]:
    """Return the time of each phase of this process since its start, and of the whole process under `WHOLE`."""
    with _lock:
        return {**_spent, WHOLE: PhaseTime(1, time.perf_counter() - _started_at[0], time.process_time())}


def sum_phases(processes: Iterable[Mapping[str, PhaseTime]]) -> dict[str, PhaseTime]:
    """Add up the times of each phase over `processes`, whose elements come from `spent`."""
    by_phase: dict[str, list[PhaseTime]] = {}
    for process in processes:
        for name, time_of in process.items():
            by_phase.setdefault(name, []).append(time_of)
    return {name: PhaseTime(*map(sum, zip(*times, strict=True))) for name, times in by_phase.items()}
