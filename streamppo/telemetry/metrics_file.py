"""metrics.jsonl: one line for each event of a run. All numbers about a whole run come from this file.

The first name of a line is its kind (`telemetry.catalogue.LINES`). A kill or a full disk may truncate the last line: a
last line without a newline is ignored. A damaged line is skipped and reported, and the run continues.
"""

import json
import os
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Annotated, NamedTuple, NotRequired, TypeAlias, TypedDict, TypeGuard, get_args

import msgspec

from streamppo import durable
from streamppo.errors import RunError

METRICS = "metrics.jsonl"
FINISHED = "finished"
"""The outcome of a run that made all its updates."""
Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e17, le=1e17)]
"""The type of the required numbers of a line: finite, and small enough to be rounded. A reward is at most 1e16."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
"""A number of tokens, trajectories or prompts."""
Digits: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^-?[0-9]{1,18}$")]
"""A lag or an age in versions, as a string, because JSON allows only strings as names."""


class PartLine(TypedDict):
    """A driver begins."""

    part: int
    wall_s: Number
    version: int


class UpdateLine(TypedDict):
    """An update was made. The line also has the other metrics of the catalogue, each a float."""

    update: int
    wall_s: Number
    reward: NotRequired[Number]
    tokens_trained: Number
    tokens_too_old: Number
    wait_s: Number
    update_s: Number
    push_ms: Number
    lag_histogram: dict[Digits, Count]


class RemadeLine(TypedDict):
    """An update's line was lost. This line has the metrics that follow from the archived batch."""

    remade: int
    wall_s: Number
    reward: NotRequired[Number]
    tokens_trained: Number
    tokens_too_old: Number
    lag_histogram: dict[Digits, Count]


class RedoneLine(TypedDict):
    """An update was repeated."""

    redone: int
    wall_s: Number


class EvaluationLine(TypedDict):
    """An evaluation ended. `versions`: the oldest and the newest that answered. Without scores `accuracy` is None."""

    evaluation: int
    wall_s: Number
    accuracy: Number | None
    count: Count
    failed: Count
    versions: tuple[int, int]


class PhasesLine(TypedDict):
    """The time of each phase of a process since its start: calls, wall seconds and CPU seconds."""

    phases: str
    wall_s: Number
    spent: dict[str, tuple[Count, Number, Number]]


class QueueLine(TypedDict):
    """Trajectories that are ready (`queue`) and being sampled, and the prompts skipped by `algorithm.curriculum`."""

    queue: Count
    wall_s: Number
    in_flight: Count
    skipped_prompts: NotRequired[Count]


class SampleLine(TypedDict):
    """The beginning of a sampled completion, and the end of its prompt."""

    prompt: str
    completion: str
    reward: Number
    version: int


class EngineLine(TypedDict):
    """Counters of a rollout actor since its start, and its newest completion. Numbers without data are absent."""

    engine: str
    wall_s: Number
    version: int
    tokens: Count
    busy_s: Number
    idle_s: Number
    prefix_reused: NotRequired[Number]
    context_reused: NotRequired[Number]
    kv_age: NotRequired[Number]
    kv_ages: NotRequired[dict[Digits, Count]]
    agents: NotRequired[dict[str, Count]]
    sampled: SampleLine | None


class RestartLine(TypedDict):
    """A stage died and is restarted."""

    restart: str
    wall_s: Number
    reason: str


class EndLine(TypedDict):
    """The driver ends."""

    end: str
    wall_s: Number


Line: TypeAlias = (
    PartLine
    | UpdateLine
    | RemadeLine
    | RedoneLine
    | EvaluationLine
    | PhasesLine
    | QueueLine
    | EngineLine
    | RestartLine
    | EndLine
)
KINDS: dict[str, type[Line]] = {next(iter(kind.__annotations__)): kind for kind in get_args(Line)}


class Content(NamedTuple):
    """The valid `lines` of a file, and a sentence about each damaged line (`damage`)."""

    lines: list[Line]
    damage: list[str]


class Tail:
    """Reads each new line of the run in `folder` once, starting at byte `end` of metrics.jsonl.

    If the file was replaced or truncated, the next read starts at byte 0, and `times_begun` grows by one. `written_s`
    is the time of the last write in seconds since 1970, or 0 if the file does not exist.
    """

    def __init__(self, folder: Path, end: int = 0) -> None:
        self.path, self.end = folder / METRICS, end
        self.times_begun, self.written_s = 0, 0.0
        self._file: tuple[int, int] | None = None

    def read(self, most_bytes: int = -1) -> list[bytes]:
        """Return the next complete lines, of about `most_bytes` bytes together; by default all. Raises `RunError`."""
        try:
            with durable.reading(self.path, whole=True) as file:
                status = os.fstat(file.fileno())
                self._recognize((status.st_dev, status.st_ino), status.st_size)
                self.written_s = status.st_mtime
                file.seek(self.end)
                # During a concurrent write a line may have no newline yet: reading ends before this line.
                complete = list(takewhile(lambda text: text.endswith(b"\n"), file.readlines(most_bytes)))
        except FileNotFoundError:
            self.written_s = 0.0
            return []
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read: {error}") from error
        self.end += sum(map(len, complete))
        return complete

    def _recognize(self, file: tuple[int, int], size: int) -> None:
        if self._file not in (None, file) or size < self.end:
            self.end = 0
        elif self._file is not None:
            return
        self._file = file
        self.times_begun += 1


class LineReader:
    """Reads and parses each new line of the run in `folder` once. `content` has all lines of the present file."""

    def __init__(self, folder: Path) -> None:
        self.content = Content([], [])
        self.times_begun = self._count = 0
        self._tail = Tail(folder)

    def read(self) -> list[Line]:
        """Read the lines written since the last call. Returns the valid lines."""
        new: list[Line] = []
        texts = self._tail.read()
        if self._tail.times_begun != self.times_begun:
            self.times_begun, self._count, self.content = self._tail.times_begun, 0, Content([], [])
        for text in texts:
            self._count += 1
            line = parse(text)
            if line is None:
                self.content.damage.append(f"{self._tail.path}: line {self._count} is damaged: it is left out")
            else:
                new.append(line)
        self.content.lines.extend(new)
        return new


def read(folder: Path) -> list[Line]:
    """Return the valid lines of the run in `folder`; none if there is no metrics.jsonl."""
    return content(folder).lines


def content(folder: Path) -> Content:
    """Return the lines of the run in `folder`, and the damage of its file."""
    reader = LineReader(folder)
    reader.read()
    return reader.content


def updates(folder: Path) -> list[UpdateLine]:
    """Return the lines of updates, ordered by version."""
    return sorted((line for line in read(folder) if "update" in line), key=lambda line: line["update"])


def recorded_versions(lines: Iterable[Line]) -> set[int]:
    """Return the versions of all updates that have a line, original or remade."""
    return {version_of(line) for line in lines if "update" in line or "remade" in line}


def drop_truncated_line(folder: Path) -> None:
    """Remove a truncated last line, to which the next line would be appended."""
    path = folder / METRICS
    if path.exists():
        os.truncate(path, durable.read(path).rfind(b"\n") + 1)


def drop_after(folder: Path, version: int) -> None:
    """Remove the lines of updates whose version is above `version`."""

    def is_later(text: bytes) -> bool:
        line = parse(text)
        return line is not None and max(recorded_versions([line]), default=0) > version

    path = folder / METRICS
    texts = durable.read(path).splitlines(keepends=True)
    durable.write(path, b"".join(text for text in texts if not is_later(text)))


def parse(text: bytes) -> Line | None:
    """Parse one line; None for a damaged line."""
    try:
        content: object = json.loads(text)
    # Thousands of nested brackets raise RecursionError.
    except (ValueError, RecursionError):
        return None
    return content if is_line(content) else None


def version_of(line: UpdateLine | RemadeLine) -> int:
    """Return the version that the line's update made."""
    return line["remade"] if "remade" in line else line["update"]


def numbers(line: UpdateLine | RemadeLine) -> dict[str, float]:
    """Return all numbers of an update's line: its version, its seconds, and its metrics."""
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float)}


def is_line(content: object) -> TypeGuard[Line]:
    """Return whether `content` has all fields of its kind, and no name that is another kind's first name."""
    if not isinstance(content, dict):
        return False
    kind = next(iter(content), "")
    # Readers recognize a line by the name of its kind ("update" in line), so each line must have only one such name.
    if KINDS.keys() & content != {kind}:
        return False
    try:
        msgspec.convert(content, KINDS[kind])
    # Names with a lone surrogate raise UnicodeError.
    except (msgspec.ValidationError, UnicodeError):
        return False
    return True
