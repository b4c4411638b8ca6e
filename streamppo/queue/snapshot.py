"""The queue that can be written down and rebuilt. Pure: no Ray, no disk.

drain     what has changed since the last call; all of it goes into one transaction of the journal
restore   the inverse: the queue as of its last transaction, leases and requests included
"""

import heapq
from collections import Counter
from pathlib import Path

from streamppo.errors import JournalError, QueueError
from streamppo.queue.records import Changes, Counters, Lease, Saved, SavedSlot
from streamppo.queue.rules import QueueRules
from streamppo.queue.slot import Slot, Unit
from streamppo.types import Batch


class DurableQueue(QueueRules):
    """See `QueueRules` for the rules; this adds none."""

    def drain(self) -> Changes:
        """What has changed since the last call, for the journal."""
        leased = [version for version in self._new_leases if version in self._leases]
        changes = Changes(
            Counters(
                shape=self._shape,
                version=self.version,
                opened=self._opened,
                abandoned=self._abandoned,
                counts=dict(self._counts),
                dropped=dict(self._dropped),
                failed=dict(self._failed),
                fenced=tuple(self._fenced),
            ),
            tuple(slot.saved() for slot in self._touched.values()),
            tuple(self._lease(version) for version in leased),
            tuple(self._gone),
            tuple(self._dead),
            tuple(self._ended),
        )
        self._touched, self._gone, self._new_leases, self._dead, self._ended = {}, [], [], [], []
        return changes

    def restore(self, saved: Saved, path: Path) -> None:
        """Make this new queue the one that was saved in `path`. Raises `JournalError` for a queue of another shape."""
        counters = saved.counters
        if counters.shape != self._shape:
            raise JournalError(
                f"{path}: of another run: its (task.kind, queue.samples_per_prompt, trajectories taken together) are "
                f"{counters.shape}, which a run keeps, and the configuration says {self._shape}"
            )
        self.version, self._opened, self._abandoned = counters.version, counters.opened, counters.abandoned
        self._counts, self._dropped = Counter(counters.counts), Counter(counters.dropped)
        self._failed, self._fenced = Counter(counters.failed), set(counters.fenced)
        for row in saved.slots:
            self._restore_slot(row)
        for lease in saved.leases:
            units = list(dict.fromkeys(self._units[self._unit_of(number)] for number in lease.slots))
            for unit in units:
                self._forget(unit)
            chosen = tuple(trajectory for unit in units for trajectory in unit.trajectories)
            batch = Batch(version=lease.version, min_version=lease.min_version, trajectories=chosen)
            self._leases[lease.version] = (batch, units)
        self._ready_units = sum(unit.missing == 0 for unit in self._units.values())

    def leased(self, version: int) -> Batch:
        """The batch of `version`. Raises `QueueError` if it is not leased."""
        if version not in self._leases:
            raise QueueError(f"version {version + 1} was made without the batch of version {version}")
        return self._leases[version][0]

    def lost_all(self) -> None:
        """Nobody is left of those who were sampling; all of it is sampled again."""
        for actor in {slot.actor for slot in self._slots.values() if slot.actor is not None}:
            self.lost(actor)
        # Whoever was fenced went with the rest, and the names are free for others.
        self._fenced.clear()

    def _restore_slot(self, row: SavedSlot) -> None:
        unit = self._units.setdefault(self._unit_of(row.number), Unit(missing=self._unit_size))
        slot = Slot(row.number, row.identity, unit, row.actor, row.call, row.failures, row.trajectory)
        unit.slots.append(slot)
        unit.missing -= slot.trajectory is not None
        self._slots[row.identity.prompt, row.identity.sample] = slot
        if slot.actor is not None:
            call, slots = self._calls.get(slot.actor, (-1, []))
            if slot.call >= call:
                self._calls[slot.actor] = (slot.call, [*slots, slot] if slot.call == call else [slot])
        elif slot.trajectory is None:
            heapq.heappush(self._open, slot)

    def _lease(self, version: int) -> Lease:
        batch, units = self._leases[version]
        numbers = tuple(slot.number for unit in units for slot in unit.slots)
        return Lease(version=version, min_version=batch.min_version, slots=numbers)

    def _unit_of(self, number: int) -> int:
        """The number of the first slot of its unit."""
        return number - number % self._unit_size

    @property
    def _shape(self) -> tuple[str, int, int]:
        return (self._task, self._samples, self._unit_size)
