"""The rows of the journal, and the changes that one transaction writes."""

from typing import Literal, NamedTuple, TypeAlias

from streamppo.queue.rules.slot import ISSUED, OPEN, READY, SlotState, TrajectoryRecord
from streamppo.types import Identity, Trajectory, WireStruct

Ending: TypeAlias = Literal["too_old", "failed", "dead_letter", "lost", "abandoned", "resampled"]
GIVEN_UP: tuple[Ending, ...] = ("abandoned", "resampled")
"""The endings after which the slot is abandoned."""


class SavedSlot(WireStruct, frozen=True):
    """A slot that is held, or a part of one.

    Request `call` of `actor` has its ticket, or its trajectory is stored, or it is open. If the queue has shards, a
    `record` stands for the trajectory.
    """

    number: int
    identity: Identity
    actor: str | None
    call: int
    failures: int
    trajectory: Trajectory | None
    part: int = 0
    record: TrajectoryRecord | None = None

    @property
    def stored(self) -> Trajectory | None:
        """The trajectory, or its record, if it has come."""
        return self.record or self.trajectory

    @property
    def state(self) -> SlotState:
        """Open, issued or ready; a ready one is leased if a `Lease` names it."""
        return READY if self.stored else ISSUED if self.actor else OPEN


class GroupShape(NamedTuple):
    """The task's kind and the sizes of its groups and units: they give every slot its number."""

    task: str
    samples_per_prompt: int
    unit_size: int

    def slots_of(self, prompt: int) -> range:
        """The numbers of a prompt's slots."""
        first = prompt * self.samples_per_prompt
        return range(first, first + self.samples_per_prompt)


class Counters(WireStruct, frozen=True):
    """Everything about a queue that is not one of its slots. A journal of another shape belongs to another run."""

    shape: GroupShape
    version: int
    opened: int
    abandoned: int
    counts: dict[str, int]
    tokens: dict[str, int]
    dropped: dict[str, int]
    failed: dict[str, int]
    fenced: tuple[str, ...]
    admitted_lag: int | None = None


class Lease(WireStruct, frozen=True):
    """The batch of `version`: these slots, by number and part, in this order."""

    version: int
    min_version: int
    slots: tuple[tuple[int, int], ...]


class EndedAttempt(WireStruct, frozen=True):
    """An attempt that was never trained on and never will be, and why; the archive names those that were."""

    number: int
    identity: Identity
    state: Ending
    reason: str


class DeadLetter(WireStruct, frozen=True):
    """A trajectory that arrived and cannot be trained on, with the reason."""

    trajectory: Trajectory
    reason: str


class ArchivedBatch(WireStruct, frozen=True):
    """The files of one batch in the archive: the SHA-256 of the only one, or of each shard's part.

    All prompts of the batch are from `first_prompt` to `last_prompt`.
    """

    files: tuple[str, ...]
    first_prompt: int
    last_prompt: int


class PublishedVersion(WireStruct, frozen=True):
    """A published version: its weights' digest, and the archived batch that made it; version 0 has none."""

    version: int
    digest: str
    archived: ArchivedBatch | None


class Changes(NamedTuple):
    """The changes that one transaction writes, in this order."""

    counters: Counters
    slots: tuple[SavedSlot, ...] = ()
    leases: tuple[Lease, ...] = ()
    gone: tuple[tuple[int, int], ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    ended: tuple[EndedAttempt, ...] = ()


class QueueSnapshot(NamedTuple):
    """All that a queue is rebuilt from."""

    counters: Counters
    slots: tuple[SavedSlot, ...]
    leases: tuple[Lease, ...]
