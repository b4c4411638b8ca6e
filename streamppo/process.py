"""Settings of streamppo's processes: garbage collection, log output, and the time of their phases.

Garbage collection: trajectories that wait a second for their rewards survive the cheap passes, and Python makes a full
pass every second. A full pass visits every object: it stops the process for 0.3 s with torch and transformers loaded.
The objects of a trajectory form no cycles, so full passes can be rare. The import of torch, transformers and Ray takes
8.5 s of CPU, and 7.4 s `without_gc`.

Log lines: every module logs to `logging.getLogger(__name__)`; each process calls `log_to_stdout` once. A warning begins
with that word, and on a terminal lines are wrapped between words. Ray forwards an actor's standard output to the
driver's, which may lose its reader (`| head`, a closed terminal): later output then goes to a file, and the run
continues. An actor's log lines begin with the secret in `MARK`; the driver removes it, and puts `PRINTS` before all
other lines of an actor, which rewards and environments print. If such code runs in a command's process, `naming_prints`
adds the prefix.

Compiled kernels: a process on a GPU keeps them in ~/.cache/streamppo, for the next process and the next run.

Phases: the calls, wall seconds and CPU seconds of each phase of a process since its start. Reports bring them to the
driver, and metrics.jsonl has them (`telemetry/catalogue.py` names every phase). Phases are not nested.
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
"""The actors' environment variable with the driver's secret: no text of a policy can begin with the secret."""
PRINTS = "prints: "
"""Prefix of an output line that a user's code has printed."""
LINE_BYTES = 8 * 2**10
"""A longer line is split into several."""
CGROUPS = Path("/sys/fs/cgroup")
PR_SET_PDEATHSIG = 1
"""The option of prctl(2) for a signal to this process when the thread that created it ends."""
MORE_OBJECTS = 200_000
"""Growth in live objects that triggers a pass: garbage cycles may hold tens of MiB until then."""
CACHES = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "CUTE_DSL_CACHE_DIR": "cutlass",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""The variables with a library's folder of compiled kernels, and our folder for each."""
FLASH_KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""The variable by which flash-attn 4 keeps compiled kernels; by default every process compiles them again."""

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command or a run: Ctrl-C, a request to stop, a closed terminal."""
WHOLE = "process"
"""The phase that is the whole process, with all of its threads."""


@contextmanager
def without_gc() -> Generator[None]:
    """Collect no garbage in the block, which imports libraries; no later pass visits its objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_gc() -> None:
    """Exclude all present objects from garbage collection, and make passes over later objects rare (`MORE_OBJECTS`).

    Call it once everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MORE_OBJECTS)


def cores() -> int:
    """Count the cores that this process may use, as far as affinity and a container's quota allow."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, _quota() or count)


def _quota() -> int | None:
    """The cores that the cgroup of this container allows, of version 2 or 1; None without a bound."""
    with suppress(OSError, ValueError):
        allowed, period = (CGROUPS / "cpu.max").read_text().split()
        return None if allowed == "max" else max(1, int(allowed) // int(period))
    with suppress(OSError, ValueError):
        allowed = int((CGROUPS / "cpu" / "cpu.cfs_quota_us").read_text())
        period = int((CGROUPS / "cpu" / "cpu.cfs_period_us").read_text())
        return None if allowed < 0 else max(1, allowed // period)
    return None


def compile_caches() -> dict[str, str]:
    """Return the variables by which a process on a GPU keeps compiled kernels, without those set by the user.

    They are for libraries that read them when they are imported. Another user's folder is not used, nor a disk without
    locks, on which flash-attn waits for 15 s and fails.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamppo"
    if fault := _unusable(base):
        log.info("compiled kernels are not kept for the next run: %s: %s", base, fault)
        return {}
    variables = {FLASH_KEEPS: "1"} | {name: str(base / folder) for name, folder in CACHES.items()}
    return {name: value for name, value in variables.items() if name not in os.environ}


def _unusable(folder: Path) -> str:
    """Return the reason why compiled kernels cannot be kept in `folder`; "" if they can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A kernel is code: a user who can write here can run code in our processes.
        if folder.stat().st_uid != os.getuid():
            return "another user's"
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the parent thread that created it ends. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def open_closed_streams() -> None:
    """Open the null device for each closed standard stream (`>&-`): else a file gets its number, and children print."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor: those before are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        stream = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
        for alias in (name, f"__{name}__"):
            setattr(sys, alias, stream)


def escape_unprintable() -> None:
    """Print characters that the output's encoding lacks, unpaired surrogates included, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        # A replaced stream may have no `reconfigure`.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def log_to_stdout(who: str = "") -> None:
    """Write the package's log lines to standard output, each after `who: ` if given. Repeated calls do nothing."""
    escape_unprintable()
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
    """In the block, redirect standard output or standard error to the file `path` once its reader is gone.

    This includes everything that Python writes, also lines that Ray's threads print.
    """
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        # A stream that a caller has replaced stays.
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
    """A descriptor that is redirected to a file when a write to it fails."""

    def __init__(self, descriptor: int, path: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._path = path

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write to the reader, or to the file if the reader is gone."""
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
    """In the block, make lines that a user's code prints in this process harmless, and write `PRINTS` before each.

    Its lines go to their own stream, or all `to` one stream; our log's lines are unchanged. Code that keeps one of the
    streams writes to it in the same way after the block.
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
    """Replaces the stream `under` it, which gets whole lines."""

    def __init__(self, under: TextIO) -> None:
        self.under = under
        self._lines = _PrintedLines(under)
        super().__init__(io.BufferedWriter(self._lines), "utf-8", "backslashreplace", line_buffering=True)

    def end_line(self) -> None:
        """Write the buffered text without a newline."""
        # The printing code may have closed it.
        with suppress(ValueError):
            self.flush()
        self._lines.end()


class _PrintedLines(io.RawIOBase):
    """Writes each line, harmless and after `PRINTS`, to the stream `to`."""

    def __init__(self, to: TextIO) -> None:
        self._to, self._rest = to, b""

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the stream, for processes that are started with it."""
        return self._to.fileno()

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write the complete lines."""
        *whole, self._rest = (self._rest + bytes(data)).split(b"\n")
        while len(self._rest) > LINE_BYTES:
            whole, self._rest = [*whole, self._rest[:LINE_BYTES]], self._rest[LINE_BYTES:]
        rows = (line.removesuffix(b"\r").decode(errors="replace") for line in whole)
        self._to.write("".join(f"{PRINTS}{harmless(row)}\n" for row in rows))
        self._to.flush()
        return len(bytes(data))

    def end(self) -> None:
        """Write the incomplete line."""
        if self._rest:
            line, self._rest = self._rest + b"\n", b""
            _PrintedLines(self._to).write(line)


def _own_stream() -> TextIO:
    """Return the current standard output, for our own lines."""
    return sys.stdout.under if isinstance(sys.stdout, _Prints) else sys.stdout


class _Named(logging.Formatter):
    """Formats a message after `head` and, from warnings on, its level."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self._head = head

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the first line."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._head}{level}{record.message}"


class _Lines(logging.Handler):
    """Writes each record to the current `sys.stdout`; each of its rows begins with `mark`."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark = mark

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; a lost reader does not stop the process."""
        try:
            rows = wrap(lines(self.format(record)), _columns()).split("\n")
            stream = _own_stream()
            stream.write("".join(f"{self._mark}{row}\n" for row in rows))
            stream.flush()
        except OSError:
            self.handleError(record)


def with_origin(line: str, mark: str) -> str:
    """Make a line of an actor's output harmless: without `mark` if it is a log line, else after `PRINTS`.

    Example: mark "5e1f", "5e1fqueue: opened" -> "queue: opened", "queue: opened" -> "prints: queue: opened".
    """
    return harmless(line.removeprefix(mark)) if mark and line.startswith(mark) else f"{PRINTS}{harmless(line)}"


def _columns() -> int:
    """Columns of the terminal behind standard output; 0 if there is none."""
    try:
        stream = _own_stream()
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError, AttributeError):
        return 0


# --- phases ----------------------------------------------------------------------------------------------------------


class PhaseTime(NamedTuple):
    """Time of a phase. `cpu_s` is that of the threads in the phase, without helper threads that they wait for."""

    calls: int
    wall_s: float
    cpu_s: float


_STARTED = time.perf_counter()
_spent: dict[str, PhaseTime] = {}
_lock = Lock()


class phase(ContextDecorator):
    """Context manager or decorator: count the block, or every call of the function, as `name`.

    Use `add` for a block that awaits.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _recreate_cm(self) -> "phase":
        """A new object for each call: several threads may be in one function."""
        return phase(self._name)

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        add(self._name, time.perf_counter() - self._wall, time.thread_time() - self._cpu)


def add(name: str, wall_s: float, cpu_s: float = 0.0) -> None:
    """Add one call to a phase. Leave `cpu_s` at 0 for a phase that awaits: the thread runs other tasks meanwhile."""
    with _lock:
        calls, wall, cpu = _spent.get(name, (0, 0.0, 0.0))
        _spent[name] = PhaseTime(calls + 1, wall + wall_s, cpu + cpu_s)


def spent() -> dict[str, PhaseTime]:
    """The time of every phase of this process since its start, and of the whole process."""
    with _lock:
        return {**_spent, WHOLE: PhaseTime(1, time.perf_counter() - _STARTED, time.process_time())}


def sum_phases(processes: Iterable[Mapping[str, PhaseTime]]) -> dict[str, PhaseTime]:
    """The sum of several processes' `spent` by phase."""
    by_phase: dict[str, list[PhaseTime]] = {}
    for process in processes:
        for name, time_of in process.items():
            by_phase.setdefault(name, []).append(time_of)
    return {name: PhaseTime(*map(sum, zip(*times, strict=True))) for name, times in by_phase.items()}
