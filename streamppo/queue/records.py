"""The queue as it lies in the journal, and what has changed since it was last written there."""

from typing import Literal, NamedTuple, TypeAlias

from streamppo.types import Crossing, Identity, Trajectory

State: TypeAlias = Literal["open", "issued", "ready"]
Ending: TypeAlias = Literal["too_old", "failed", "dead_letter", "lost", "abandoned", "equal_group"]
GIVEN_UP: tuple[Ending, ...] = ("abandoned", "equal_group")
"""The endings after which nobody samples the slot again."""


class SavedSlot(Crossing, frozen=True):
    """One slot that is still alive. `actor` and `call` say who samples it, and by which of its requests."""

    number: int
    identity: Identity
    actor: str | None
    call: int
    failures: int
    trajectory: Trajectory | None

    @property
    def state(self) -> State:
        """Where it stands in the drawing of slot.py; a lease is kept apart."""
        return "ready" if self.trajectory else "issued" if self.actor else "open"


class Counters(Crossing, frozen=True):
    """Everything about a queue that is not one of its slots. A journal of another shape belongs to another run."""

    shape: tuple[str, int, int]
    version: int
    opened: int
    abandoned: int
    counts: dict[str, int]
    dropped: dict[str, int]
    failed: dict[str, int]
    fenced: tuple[str, ...]


class Lease(Crossing, frozen=True):
    """The batch of `version`: these slots, in this order."""

    version: int
    min_version: int
    slots: tuple[int, ...]


class Ended(Crossing, frozen=True):
    """An attempt that was never trained on and never will be, and why; the archive names those that were."""

    number: int
    identity: Identity
    state: Ending
    reason: str


class DeadLetter(Crossing, frozen=True):
    """A trajectory that arrived and cannot be trained on, with the reason."""

    trajectory: Trajectory
    reason: str


class Made(Crossing, frozen=True):
    """A published version: its weights' digest, and the SHA-256 of the archived batch that made it."""

    version: int
    digest: str
    archive_sha256: str | None


class Changes(NamedTuple):
    """What one transaction writes, in this order."""

    counters: Counters
    slots: tuple[SavedSlot, ...] = ()
    leases: tuple[Lease, ...] = ()
    gone: tuple[int, ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    ended: tuple[Ended, ...] = ()


class Saved(NamedTuple):
    """All that a queue is rebuilt from."""

    counters: Counters
    slots: tuple[SavedSlot, ...]
    leases: tuple[Lease, ...]
