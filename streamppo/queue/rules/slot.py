"""The admission slot with its states, and the unit: the slots that are trained on together.

With segments, a slot has one part per segment: ready or leased parts, then the part that is still being sampled.

open ---> issued ---> ready ---> leased ---> consumed
 | ^        |  |        |  |
 | +--------+--|--------+  |      failed, a dead letter, lost with its actor, too old: reopened as attempt + 1
 |             |           |
 +-------------+-----------+--> abandoned     too many failures, or a group without signal: the whole unit is dropped

open        to be sampled
issued      an actor has its ticket
ready       its trajectory is stored; other slots of its unit may still be missing
leased      in the batch of an update
consumed    the update has published a version
abandoned   not to be sampled again
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from streamppo.errors import TooManyFailures
from streamppo.types import Identity, Trajectory, flags, ints

NO_CALL = -1
"""The request number of a slot's later parts: an actor continues a completion without requesting a ticket."""
WINDOW = 256
FEWEST = 64
QUOTED = 3


class SlotState(StrEnum):
    """A state of a slot in the diagram above."""

    OPEN = "open"
    ISSUED = "issued"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"
    ABANDONED = "abandoned"


OPEN, ISSUED, READY, LEASED, CONSUMED, ABANDONED = SlotState
"""The states as module names: a member access such as `SlotState.OPEN` takes 0.1 microseconds in Python 3.11."""

NEXT: dict[SlotState, tuple[SlotState, ...]] = {
    OPEN: (ISSUED, ABANDONED),
    ISSUED: (READY, OPEN, ABANDONED),
    READY: (LEASED, OPEN, ABANDONED),
    LEASED: (CONSUMED,),
    CONSUMED: (),
    ABANDONED: (),
}
"""The arrows of the diagram; any other transition is a bug in streamppo."""


class TrajectoryRecord(Trajectory, frozen=True):
    """The queue's record of a trajectory whose columns are in a shard (shard.py); the record's columns are empty.

    `ages`: pairs of a version and its number of tokens, oldest version first. With a `defect` it keeps all columns.
    """

    length: int = 0
    newest_version: int = 0
    ages: tuple[tuple[int, int], ...] = ()
    defect: str = ""

    @property
    def num_tokens(self) -> int:
        return self.length

    @property
    def num_sampled(self) -> int:
        return sum(count for _, count in self.ages)

    @property
    def oldest_version(self) -> int:
        return self.ages[0][0]


SHARD_COLUMNS: dict[str, Any] = {"explanation": ""} | dict.fromkeys(
    (
        *("prompt_tokens", "tokens", "logprobs", "versions", "mask", "token_rewards", "candidates", "candidate_counts"),
        *("teacher_logprobs", "routes", "branches", "turns"),
    ),
    b"",
)
"""The fields of a trajectory that are empty in its record."""


def make_record(trajectory: Trajectory, defect: str | None) -> TrajectoryRecord:
    """Make the record of a trajectory; with a `defect` the record keeps all fields."""
    fields = structs.asdict(trajectory)
    if defect is not None:
        ages = ((0, trajectory.num_sampled),)
        return TrajectoryRecord(**fields, length=trajectory.num_tokens, ages=ages, defect=defect)
    versions = ints(trajectory.versions)
    ages, counts = np.unique(versions[flags(trajectory.mask)], return_counts=True)
    return TrajectoryRecord(
        **fields | SHARD_COLUMNS,
        length=trajectory.num_tokens,
        newest_version=int(versions.max()),
        ages=tuple(zip(ages.tolist(), counts.tolist(), strict=True)),
    )


class FailedAttempt(NamedTuple):
    """An attempt that failed in `stage`: its number of sampled tokens, the version of the oldest, and its source."""

    stage: str
    tokens: int
    oldest: int
    source: str


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one trajectory. Slots are numbered in the order in which they open.

    While the slot is issued, `actor` holds its ticket, which it got by its request `call`. `failed` describes a failed
    attempt until the attempt's end is recorded. `part` counts the segments of a slot, including segments of failed
    attempts. `place` = (number, part) identifies the part, and sorts by age.
    """

    number: int
    identity: Identity
    unit: "Unit"
    state: SlotState = OPEN
    actor: str | None = None
    call: int = 0
    failures: int = 0
    trajectory: Trajectory | None = None
    part: int = 0
    failed: FailedAttempt | None = None
    place: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.number, self.part

    def __lt__(self, other: "Slot") -> bool:
        return self.number < other.number

    def move(self, to: SlotState) -> None:
        assert to in NEXT[self.state], f"slot {self.number} was {self.state} and cannot become {to}"
        self.state = to

    def issue(self, actor: str, call: int) -> None:
        self.move(ISSUED)
        self.actor, self.call = actor, call

    def store(self, trajectory: Trajectory) -> None:
        self.move(READY)
        self.trajectory, self.actor = trajectory, None

    def open_next_segment(self) -> "Slot":
        """Return the next part, which `actor` samples without another ticket."""
        following = structs.replace(self.identity, segment=self.identity.segment + 1)
        unit = Unit(missing=1)
        slot = replace(self, identity=following, unit=unit, call=NO_CALL, part=self.part + 1)
        unit.slots.append(slot)
        return slot

    def reopen(self) -> None:
        """Open the slot again under a new identity, which a late trajectory of the old attempt does not match."""
        self.move(OPEN)
        old = self.identity
        self.identity = Identity(task=old.task, prompt=old.prompt, sample=old.sample, attempt=old.attempt + 1)
        self.actor = self.trajectory = self.failed = None


@dataclass(slots=True, eq=False)
class Unit:
    """The slots that are trained on together: a whole group or one slot. `missing` is the number of slots not ready."""

    slots: list[Slot] = field(default_factory=list[Slot])
    missing: int = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        return [slot.trajectory for slot in self.slots if slot.trajectory is not None]

    def end(self) -> None:
        """Remove the slots, which have ended, to break the reference cycle between unit and slots."""
        self.slots.clear()


class FailureWindow:
    """The outcomes of the first attempts at the last `WINDOW` slots; empty after the queue is rebuilt."""

    def __init__(self, max_rate: float) -> None:
        self._max_rate = max_rate
        self._reasons: deque[str | None] = deque(maxlen=WINDOW)

    def add(self, slot: Slot, reason: str | None) -> None:
        """Record the outcome of a slot's first attempt (None: success). Retries would count a prompt several times."""
        if slot.failures == 0:
            self._reasons.append(reason)

    def check(self) -> None:
        if len(self._reasons) < FEWEST:
            return
        reasons = [reason for reason in self._reasons if reason is not None]
        rate = len(reasons) / len(self._reasons)
        if rate <= self._max_rate:
            return
        quoted = "; ".join(list(dict.fromkeys(reasons))[:QUOTED])
        raise TooManyFailures(
            f"{rate:.0%} of the last {len(self._reasons)} trajectories failed "
            f"(queue.max_failure_rate is {self._max_rate:.0%}): {quoted}"
        )


def count_older(trajectory: Trajectory, version: int) -> tuple[int, int]:
    """Return the number of tokens sampled by versions before `version`, and the number of all sampled tokens."""
    if isinstance(trajectory, TrajectoryRecord):
        return sum(count for age, count in trajectory.ages if age < version), trajectory.num_sampled
    mask = flags(trajectory.mask)
    return int((ints(trajectory.versions)[mask] < version).sum()), int(mask.sum())


def newest_version(trajectories: Sequence[Trajectory]) -> int:
    """The newest version among all tokens of the trajectories."""
    if isinstance(trajectories[0], TrajectoryRecord):
        return max(trajectory.newest_version for trajectory in trajectories if isinstance(trajectory, TrajectoryRecord))
    return int(ints(b"".join([trajectory.versions for trajectory in trajectories])).max())


def all_younger(units: Iterable[Unit], version: int) -> bool:
    """True if no token of `units` was sampled by a version before `version`."""
    trajectories = [trajectory for unit in units for trajectory in unit.trajectories]
    if isinstance(trajectories[0], TrajectoryRecord):
        return all(trajectory.oldest_version >= version for trajectory in trajectories)
    columns = b"".join([trajectory.versions for trajectory in trajectories])
    return bool(ints(columns).min() >= version)
