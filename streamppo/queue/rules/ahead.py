"""How many versions engines sample ahead: as many as the learner needs, at most `max_lag` (`queue.ahead`).

If engines sample further ahead than the learner needs, updates are no faster, and trained tokens are older. With
"as_needed", admission aims at a lag that begins at 1 and may change when a version is published:

    the learner has no batch yet, and all slots are taken      the lag doubles, plus 1; after a fall it rises by 1
    after each of the last patience * (lag + 1) versions       the lag falls by k, to 1 at least
    at least k >= 1 batches were complete and not taken

The smallest number of batches left over, k, is a standing queue: with k batches fewer the learner would not have
waited. CoDel measures the delay of a router in the same way (https://doi.org/10.1145/2209249.2209264). Since lag + 1
batches are held, a unit is taken within lag + 1 versions. After a fall, more than lag + 1 batches are held at first.
Nothing is measured until the surplus is taken. Doubling until the first fall is TCP's slow start. After a rise, the
trajectories of new slots have lag / 2 versions to arrive before the next rise. The patience begins at 1 and doubles, up
to 8, with each rise after a fall, so that the learner rarely waits if the needed lag is between two integers.

Example: the lag is 3, and a batch has 64 units. The learner has its next batch, and 150, 131, 140 and 170 more units
are complete after versions 8, 9, 10 and 11. At least two batches are always left over: from version 11 on the lag is 1.
"""

from dataclasses import dataclass, field

FIRST = 1
"""The lag before the first measurement."""
MOST_PATIENCE = 8


@dataclass(slots=True)
class NeededLag:
    """The lag that the learner needs; `left_over` counts the batches left over at each version since a change."""

    lag: int = FIRST
    has_fallen: bool = False
    since_rise: int = FIRST
    patience: int = 1
    left_over: list[int] = field(default_factory=list[int])

    def follow(self, left_over: int | None, *, is_full: bool, has_surplus: bool, at_most: int) -> None:
        """Adapt the lag at a new version, if `left_over` complete batches are not taken (None: the learner waits).

        `is_full`: no ticket was left to issue before this version. `has_surplus`: more than lag + 1 batches are held.
        """
        self.since_rise += 1
        if left_over is None or has_surplus:
            self.left_over.clear()
            if left_over is None and is_full and self.since_rise > self.lag // 2:
                if self.has_fallen:
                    self.patience = min(MOST_PATIENCE, 2 * self.patience)
                self.lag, self.since_rise = min(at_most, self.lag + 1 if self.has_fallen else 2 * self.lag + 1), 0
            return
        self.left_over.append(left_over)
        if len(self.left_over) >= self.patience * (self.lag + 1):
            if standing := min(self.left_over):
                self.lag, self.has_fallen = max(FIRST, self.lag - standing), True
            self.left_over.clear()
