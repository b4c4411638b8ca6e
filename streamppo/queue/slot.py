"""What the queue remembers of one admission slot, and of the slots that are trained on together.

open -> in flight -> ready -> leased -> consumed
 ^          |          |
 +----------+----------+     failed, a dead letter, lost with its actor, too old: the same slot again, attempt + 1
            |
            +-> abandoned    failed too often: the slot is given up, and its unit with it
"""

from dataclasses import dataclass, field

from streamppo.queue.records import SavedSlot
from streamppo.types import Identity, Trajectory, flags, ints


@dataclass(slots=True, eq=False)
class Slot:
    """One trajectory to be. `number` is its age; `actor` is set while it is in flight, by its request `call`."""

    number: int
    identity: Identity
    unit: "Unit"
    actor: str | None = None
    call: int = 0
    failures: int = 0
    trajectory: Trajectory | None = None

    def saved(self) -> SavedSlot:
        """As the journal keeps it."""
        return SavedSlot(
            number=self.number,
            identity=self.identity,
            actor=self.actor,
            call=self.call,
            failures=self.failures,
            trajectory=self.trajectory,
        )

    def __lt__(self, other: "Slot") -> bool:
        return self.number < other.number

    def reopen(self) -> None:
        """To be sampled once more, under an identity that what is still on its way does not have."""
        old = self.identity
        self.identity = Identity(task=old.task, prompt=old.prompt, sample=old.sample, attempt=old.attempt + 1)
        self.actor = None
        self.trajectory = None


@dataclass(slots=True, eq=False)
class Unit:
    """The slots that are trained on together: a whole group, or one alone."""

    slots: list[Slot] = field(default_factory=list[Slot])
    missing: int = 0
    abandoned: bool = False

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories of a unit that is ready."""
        return [slot.trajectory for slot in self.slots if slot.trajectory is not None]


def count_older(trajectory: Trajectory, version: int) -> tuple[int, int]:
    """(tokens that the policy sampled before `version`, all that it sampled)."""
    mask = flags(trajectory.mask)
    return int((ints(trajectory.versions)[mask] < version).sum()), int(mask.sum())
