"""Converts the queue's state to rows of the journal and back.

take_changes    all changes since the last call, for one transaction of the journal
rebuild_state   the inverse: the state as of the last transaction, including leases and requests
"""

import heapq
import logging
from collections import Counter
from pathlib import Path

from streamppo.errors import JournalError
from streamppo.queue.rules.ahead import NeededLag
from streamppo.queue.rules.curriculum import resampled_prompts
from streamppo.queue.rules.records import Changes, Counters, Lease, SavedSlot
from streamppo.queue.rules.slot import NO_CALL, OPEN, READY, Slot, TrajectoryRecord, Unit
from streamppo.queue.rules.state import NEVER, LeasedBatch, PendingChanges, QueueSettings, QueueState, TicketRequest
from streamppo.queue.store.journal import Journal

log = logging.getLogger(__name__)


def take_changes(settings: QueueSettings, state: QueueState) -> Changes:
    """Return all changes since the last call, for the journal, and clear them."""
    unwritten, state.pending_changes = state.pending_changes, PendingChanges()
    leased = [(version, state.leases[version]) for version in unwritten.leases if version in state.leases]
    return Changes(
        counters=Counters(
            shape=settings.shape,
            version=state.version,
            opened=state.opened,
            abandoned=state.abandoned,
            counts=dict(state.counts),
            tokens=dict(state.tokens),
            dropped=dict(state.dropped),
            failed=dict(state.failed),
            fenced=tuple(state.fenced),
            admitted_lag=state.admitted_lag,
            needed_lag=state.needed.lag,
        ),
        slots=tuple(_saved_slot(slot) for slot in unwritten.slots.values()),
        leases=tuple(_lease(version, batch) for version, batch in leased),
        removed=tuple(unwritten.removed),
        dead=tuple(unwritten.dead_letters),
        ended=tuple(unwritten.ended),
        zero_variance=tuple(unwritten.zero_variance.items()),
        skipped=tuple(unwritten.skipped.items()),
        rows=unwritten.rows,
    )


def read_state(settings: QueueSettings, journal: Journal) -> QueueState:
    """Read the state as of the journal's last transaction; a new state if the journal is empty."""
    saved = journal.read()
    if saved is None:
        return QueueState()
    state = rebuild_state(settings, saved, journal.path)
    if settings.curriculum is not None:
        state.resampled = resampled_prompts(journal.ended_attempts(), settings).get(state.version, {})
    log.info("rebuilt from its journal, at version %d with %d slots", state.version, len(saved.slots))
    return state


def rebuild_state(settings: QueueSettings, saved: Changes, path: Path) -> QueueState:
    """Rebuild the state saved in the journal at `path`. Raises `JournalError` for a queue of another shape."""
    counters = saved.counters
    refuse_other_shape(settings, counters, path)
    state = QueueState(
        version=counters.version,
        admitted_lag=counters.admitted_lag,
        needed=NeededLag(counters.needed_lag),
        opened=counters.opened,
        abandoned=counters.abandoned,
        counts=Counter(counters.counts),
        tokens=Counter(counters.tokens),
        dropped=Counter(counters.dropped),
        failed=Counter(counters.failed),
        fenced=set(counters.fenced),
        rows=saved.rows,
        zero_variance=dict(saved.zero_variance),
    )
    for entry in saved.slots:
        _add_slot(state, entry, settings.unit_size)
    for entry in saved.leases:
        firsts = dict.fromkeys((number - number % settings.unit_size, part) for number, part in entry.slots)
        state.lease(entry.version, entry.min_version, [state.units[first] for first in firsts])
    state.ready_units = sum(unit.missing == 0 for unit in state.units.values())
    return state


def refuse_other_shape(settings: QueueSettings, counters: Counters, path: Path) -> None:
    """Raise `JournalError` if the `counters` in the journal at `path` have another shape than `settings`."""
    if counters.shape != settings.shape:
        raise JournalError(
            f"{path}: of another run: its (task.kind, queue.samples_per_prompt, trajectories taken together) are "
            f"{tuple(counters.shape)}, which a run must keep, and the configuration says {tuple(settings.shape)}"
        )


def _add_slot(state: QueueState, saved: SavedSlot, unit_size: int) -> None:
    unit = state.units.setdefault((saved.number - saved.number % unit_size, saved.part), Unit(missing=unit_size))
    slot = Slot(
        number=saved.number,
        identity=saved.identity,
        unit=unit,
        state=saved.state,
        actor=saved.actor,
        call=saved.call,
        failures=saved.failures,
        trajectory=saved.stored,
        part=saved.part,
    )
    unit.slots.append(slot)
    state.slots[saved.identity.prompt, saved.identity.sample] = slot
    if slot.state is OPEN:
        heapq.heappush(state.open, slot)
    elif slot.state is READY:
        unit.missing -= 1
    elif slot.actor is not None:
        state.issues(slot)
        if slot.call != NO_CALL:
            last, slots = state.calls.get(slot.actor, NEVER)
            if slot.call >= last:
                state.calls[slot.actor] = TicketRequest(slot.call, [*slots, slot] if slot.call == last else [slot])


def _saved_slot(slot: Slot) -> SavedSlot:
    record = slot.trajectory if isinstance(slot.trajectory, TrajectoryRecord) else None
    return SavedSlot(
        number=slot.number,
        identity=slot.identity,
        actor=slot.actor,
        call=slot.call,
        failures=slot.failures,
        trajectory=None if record else slot.trajectory,
        record=record,
        part=slot.part,
    )


def _lease(version: int, leased: LeasedBatch) -> Lease:
    places = tuple(slot.place for unit in leased.units for slot in unit.slots)
    return Lease(version=version, min_version=leased.batch.min_version, slots=places)
