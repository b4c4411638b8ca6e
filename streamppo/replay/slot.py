"""What the queue remembers of one admission slot, and of the slots that are trained on together.

open -> in flight -> ready -> leased -> consumed
 ^          |          |
 +----------+----------+     failed, lost with its actor, too old: the same slot again, attempt + 1
            |
            +-> abandoned    failed too often: the slot is given up, and its unit with it
"""

from dataclasses import dataclass, field

import numpy as np

from streamppo.replay.saved import SavedSlot
from streamppo.types import Identity, Trajectory, flags, floats, ints

LOGPROB_SLACK = 1e-4
"""How far above 0 rounding may carry a log-prob."""


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


def defect(trajectory: Trajectory) -> str | None:
    """Why a trajectory cannot be trained on, or None."""
    count = len(trajectory.tokens) // 4
    lengths = {len(trajectory.tokens), len(trajectory.logprobs), len(trajectory.versions), 4 * len(trajectory.mask)}
    if len(lengths) != 1 or len(trajectory.tokens) % 4 or not count:
        return f"columns of different lengths, or empty: {sorted(lengths)} bytes"
    mask, logprobs = flags(trajectory.mask), floats(trajectory.logprobs)
    if not mask.any():
        return "no token was sampled by the policy"
    if not np.isfinite(logprobs[mask]).all() or (logprobs[mask] > LOGPROB_SLACK).any():
        return "a log-prob is not finite, or positive"
    if (ints(trajectory.tokens) < 0).any() or not trajectory.prompt_tokens:
        return "a token id is negative, or the prompt is empty"
    if trajectory.token_rewards and len(trajectory.token_rewards) != len(trajectory.tokens):
        return f"token rewards of {len(trajectory.token_rewards)} bytes for tokens of {len(trajectory.tokens)} bytes"
    if not np.isfinite(trajectory.reward) or not np.isfinite(floats(trajectory.token_rewards)).all():
        return f"the reward is {trajectory.reward}"
    return None
