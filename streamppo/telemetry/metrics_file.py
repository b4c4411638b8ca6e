"""metrics.jsonl: one line for every event of a run, as it happens. All numbers about a whole run are made of it.

The first name of a line is its kind (`telemetry.catalogue.LINES`). Every line ends with its newline: one without it was
cut by a kill or a full disk, and is ignored. A damaged line is left out and reported: a run goes on without it.
"""

import json
import os
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, NotRequired, TypeAlias, TypedDict, TypeGuard

import msgspec

METRICS = "metrics.jsonl"
FINISHED = "finished"
"""The end of a run that made all its updates."""


class PartLine(TypedDict):
    """A driver begins."""

    part: int
    wall_s: float
    version: int


class UpdateLine(TypedDict):
    """An update was made. Beside these, the line has every other metric of the catalogue, each a float."""

    update: int
    wall_s: float
    reward: NotRequired[float]
    tokens_trained: float
    tokens_too_old: float
    wait_s: float
    update_s: float
    push_ms: float
    lag_histogram: dict[str, int]


class RemadeLine(TypedDict):
    """An update's line was lost: the part of it that its archived batch tells, components of the reward too."""

    remade: int
    wall_s: float
    reward: NotRequired[float]
    tokens_trained: float
    tokens_too_old: float
    lag_histogram: dict[str, int]


class RedoneLine(TypedDict):
    """An update was made once more."""

    redone: int
    wall_s: float


class EvaluationLine(TypedDict):
    """All actors answered an evaluation; `versions` are the oldest and the newest that they sampled with.

    `accuracy` is None where no prompt has a score.
    """

    evaluation: int
    wall_s: float
    accuracy: float | None
    count: int
    failed: int
    versions: tuple[int, int]


class PhasesLine(TypedDict):
    """The time of a process's phases since it started: calls, wall seconds and CPU seconds of each."""

    phases: str
    wall_s: float
    spent: dict[str, tuple[int, float, float]]


class QueueLine(TypedDict):
    """Trajectories in the queue: `queue` of them are ready, `in_flight` are being sampled."""

    queue: int
    wall_s: float
    in_flight: int


class SampleLine(TypedDict):
    """A completion as it was sampled, the first part of it; of its prompt the last part."""

    prompt: str
    completion: str
    reward: float
    version: int


class EngineLine(TypedDict):
    """Counters of a rollout actor since it started, and the completion that was the newest one.

    `prefix_reused` is there once a prompt has come, the others of context_reuse.py once there is something to tell of.
    `agents` counts requests of agents and what became of them.
    """

    engine: str
    wall_s: float
    version: int
    tokens: int
    busy_s: float
    idle_s: float
    prefix_reused: NotRequired[float]
    context_reused: NotRequired[float]
    kv_age: NotRequired[float]
    kv_ages: NotRequired[dict[str, int]]
    agents: NotRequired[dict[str, int]]
    sampled: SampleLine | None


class RestartLine(TypedDict):
    """A stage died and is started again."""

    restart: str
    wall_s: float
    reason: str


class EndLine(TypedDict):
    """The driver ends."""

    end: str
    wall_s: float


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
KINDS: dict[str, type[Line]] = {
    "part": PartLine,
    "update": UpdateLine,
    "remade": RemadeLine,
    "redone": RedoneLine,
    "evaluation": EvaluationLine,
    "phases": PhasesLine,
    "queue": QueueLine,
    "engine": EngineLine,
    "restart": RestartLine,
    "end": EndLine,
}
"""The content of a line, by its first name."""


class Content(NamedTuple):
    """The lines of a file that can be used, and a sentence about every other one."""

    lines: list[Line]
    damage: list[str]


class Tail:
    """The lines of the run in `folder` behind the first `end` bytes of its file, read as they are written, each once.

    It begins anew, with `times_begun` one higher, when another file has taken its place, or one that is shorter than
    what was read. `written_s` is when it was last written to, in seconds since 1970; 0 without a file.
    """

    def __init__(self, folder: Path, end: int = 0) -> None:
        self.path, self.end = folder / METRICS, end
        self.times_begun, self.written_s = 0, 0.0
        self._file: tuple[int, int] | None = None

    def read(self, most_bytes: int = -1) -> list[bytes]:
        """Read the next lines that are whole, about so many bytes of them; by default all."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self.written_s = 0.0
            return []
        with file:
            found = os.fstat(file.fileno())
            self._recognize((found.st_dev, found.st_ino), found.st_size)
            self.written_s = found.st_mtime
            file.seek(self.end)
            # The rest of a line that is being written may come right behind its beginning.
            whole = list(takewhile(lambda text: text.endswith(b"\n"), file.readlines(most_bytes)))
        self.end += sum(map(len, whole))
        return whole

    def _recognize(self, file: tuple[int, int], size: int) -> None:
        if self._file not in (None, file) or size < self.end:
            self.end = 0
        elif self._file is not None:
            return
        self._file = file
        self.times_begun += 1


class LineReader:
    """The lines of the run in `folder`, read as they are written, each once.

    `content` has all of them so far, also when the file goes away; of another file it begins anew, as `Tail` does.
    """

    def __init__(self, folder: Path) -> None:
        self.content = Content([], [])
        self.times_begun = self._count = 0
        self._tail = Tail(folder)

    def read(self) -> list[Line]:
        """Read what was written since the last time; returns the lines of it that can be used."""
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
    """Read the lines of the run in `folder` that can be used; none if it has no such file."""
    return content(folder).lines


def content(folder: Path) -> Content:
    """Read the whole file of the run in `folder`."""
    follower = LineReader(folder)
    follower.read()
    return follower.content


def updates(folder: Path) -> list[UpdateLine]:
    """Read the lines of updates, in the order of their versions."""
    return sorted((line for line in read(folder) if "update" in line), key=lambda line: line["update"])


def recorded_versions(lines: Iterable[Line]) -> set[int]:
    """Find the versions of the updates that have a line, as it was or remade."""
    found: set[int] = set()
    for line in lines:
        if "update" in line:
            found.add(line["update"])
        elif "remade" in line:
            found.add(line["remade"])
    return found


def mend(folder: Path) -> None:
    """Remove a last line that was cut, so that the next one does not continue it."""
    path = folder / METRICS
    if path.exists():
        os.truncate(path, len(_to_newline(path.read_bytes())))


def parse(text: bytes) -> Line | None:
    """Read one line; None if it is damaged."""
    try:
        content: object = json.loads(text)
    # The second is for thousands of brackets.
    except (ValueError, RecursionError):
        return None
    return content if is_line(content) else None


def numbers(line: UpdateLine | RemadeLine) -> dict[str, float]:
    """Everything in an update's line that is a number: its version, its seconds, and its metrics."""
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float)}


def is_line(content: object) -> TypeGuard[Line]:
    """Tell if `content` has all that a line of its kind has."""
    kind = next(iter(content), None) if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        return False
    try:
        msgspec.convert(content, KINDS[kind])
    # The second is for names with half a pair of surrogates.
    except (msgspec.ValidationError, UnicodeError):
        return False
    return True


def _to_newline(data: bytes) -> bytes:
    """Leave out what comes after the last newline: it is no whole line yet, or was cut."""
    return data[: data.rfind(b"\n") + 1]
