"""One admission slot, its states, and the unit of slots that are trained on together.

With segments, a slot has a part for each: one that is ready or leased, and behind it the part that goes on.

open ---> issued ---> ready ---> leased ---> consumed
 | ^        |  |        |  |
 | +--------+--|--------+  |      failed, a dead letter, lost with its actor, too old: attempt + 1 is to be sampled
 |             |           |
 +-------------+-----------+--> abandoned     failed too often, or its group teaches nothing: the whole unit goes

open        to be sampled
issued      an actor has its ticket
ready       its trajectory is stored; the other slots of its unit may still be missing
leased      in the batch of an update
consumed    its update has published a version
abandoned   nobody samples it again
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import structs

from streamppo.types import Identity, Trajectory, flags, ints

NO_CALL = -1
"""The request of a part that goes on: none."""


class SlotState(StrEnum):
    """A slot's place in the drawing above."""

    OPEN = "open"
    ISSUED = "issued"
    READY = "ready"
    LEASED = "leased"
    CONSUMED = "consumed"
    ABANDONED = "abandoned"


OPEN, ISSUED, READY, LEASED, CONSUMED, ABANDONED = SlotState
"""The same by names of their own: Python 3.11 takes 0.1 microseconds to find a member in its class."""

NEXT: dict[SlotState, tuple[SlotState, ...]] = {
    OPEN: (ISSUED, ABANDONED),
    ISSUED: (READY, OPEN, ABANDONED),
    READY: (LEASED, OPEN, ABANDONED),
    LEASED: (CONSUMED,),
    CONSUMED: (),
    ABANDONED: (),
}
"""The arrows of the drawing; any other transition is a bug of ours."""


class TrajectoryRecord(Trajectory, frozen=True):
    """A trajectory as the queue has it if a shard has its columns (shard.py), which are empty here.

    `ages` are the versions that sampled its tokens, oldest first, and how many each of them sampled. With a `defect` it
    cannot be trained on, and still has its columns.
    """

    length: int = 0
    newest_version: int = 0
    ages: tuple[tuple[int, int], ...] = ()
    defect: str = ""

    @property
    def num_tokens(self) -> int:
        """T, the length of the completion."""
        return self.length

    @property
    def num_sampled(self) -> int:
        """The tokens that the policy sampled."""
        return sum(count for _, count in self.ages)

    @property
    def oldest_version(self) -> int:
        """The version of the oldest token that the policy sampled."""
        return self.ages[0][0]


COLUMNS_OF_SHARD: dict[str, Any] = dict.fromkeys(
    (
        "prompt_tokens",
        "tokens",
        "logprobs",
        "versions",
        "mask",
        "token_rewards",
        "candidates",
        "candidate_counts",
        "teacher_logprobs",
        "routes",
        "branches",
        "turns",
    ),
    b"",
) | {"explanation": ""}
"""Fields of a trajectory that its record does without."""


def record_of(trajectory: Trajectory, defect: str | None) -> TrajectoryRecord:
    """The record of a trajectory that is sound; one that has a `defect` keeps all that it has."""
    fields = structs.asdict(trajectory)
    if defect is not None:
        ages = ((0, trajectory.num_sampled),)
        return TrajectoryRecord(**fields, length=trajectory.num_tokens, ages=ages, defect=defect)
    versions = ints(trajectory.versions)
    ages, counts = np.unique(versions[flags(trajectory.mask)], return_counts=True)
    return TrajectoryRecord(
        **fields | COLUMNS_OF_SHARD,
        length=trajectory.num_tokens,
        newest_version=int(versions.max()),
        ages=tuple(zip(ages.tolist(), counts.tolist(), strict=True)),
    )


@dataclass(slots=True, eq=False)
class Slot:
    """One trajectory to be. `number` is its age; request `call` of `actor` was the last one that got its ticket.

    `part` counts the segments of a slot, those of attempts that failed included. `place` names the part, in the order
    of age.
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
    place: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.number, self.part

    def __lt__(self, other: "Slot") -> bool:
        return self.number < other.number

    def move(self, to: SlotState) -> None:
        """Change the state along an arrow of the drawing."""
        assert to in NEXT[self.state], f"slot {self.number} was {self.state} and cannot become {to}"
        self.state = to

    def issue(self, actor: str, call: int) -> None:
        """Give the ticket to `actor`, as part of the answer to its request `call`."""
        self.move(ISSUED)
        self.actor, self.call = actor, call

    def store(self, trajectory: Trajectory) -> None:
        """Keep the finished trajectory."""
        self.move(READY)
        self.trajectory, self.actor = trajectory, None

    def open_next_segment(self) -> "Slot":
        """Return the part behind this one: `actor` goes on to sample it, and no request has its ticket."""
        following = structs.replace(self.identity, segment=self.identity.segment + 1)
        unit = Unit(missing=1)
        slot = replace(self, identity=following, unit=unit, call=NO_CALL, part=self.part + 1)
        unit.slots.append(slot)
        return slot

    def reopen(self) -> None:
        """Sample once more, under an identity that a trajectory still on its way does not have."""
        self.move(OPEN)
        old = self.identity
        self.identity = Identity(task=old.task, prompt=old.prompt, sample=old.sample, attempt=old.attempt + 1)
        self.actor = self.trajectory = None


@dataclass(slots=True, eq=False)
class Unit:
    """The slots that are trained on together: a whole group, or one alone. `missing` of them are not ready."""

    slots: list[Slot] = field(default_factory=list[Slot])
    missing: int = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories that are stored; all of them once none is missing."""
        return [slot.trajectory for slot in self.slots if slot.trajectory is not None]

    def end(self) -> None:
        """Let go of the slots, which have ended. They know it: together they would stay until a pass for garbage."""
        self.slots.clear()


def count_older(trajectory: Trajectory, version: int) -> tuple[int, int]:
    """(tokens that the policy sampled before `version`, all that it sampled)."""
    if isinstance(trajectory, TrajectoryRecord):
        return sum(count for age, count in trajectory.ages if age < version), trajectory.num_sampled
    mask = flags(trajectory.mask)
    return int((ints(trajectory.versions)[mask] < version).sum()), int(mask.sum())


def newest_version(trajectories: Sequence[Trajectory]) -> int:
    """The newest version of any token of any of them."""
    if isinstance(trajectories[0], TrajectoryRecord):
        return max(one.newest_version for one in trajectories if isinstance(one, TrajectoryRecord))
    return int(ints(b"".join([one.versions for one in trajectories])).max())


def all_younger(units: Iterable[Unit], version: int) -> bool:
    """True if no token of `units` was sampled before `version`: the common case, found out for all units at once."""
    trajectories = [trajectory for unit in units for trajectory in unit.trajectories]
    if isinstance(trajectories[0], TrajectoryRecord):
        return all(trajectory.oldest_version >= version for trajectory in trajectories)
    columns = b"".join([trajectory.versions for trajectory in trajectories])
    return bool(ints(columns).min() >= version)
