"""The queue's rules: admission, the take, leases. Pure: no Ray, no clock, no disk.

Update u trains from version u to version u + 1 and leases batch u; the lag of a token is u minus its version.

    admission   an engine of version v may hold slots for the updates up to v + max_lag: a slot opens while
                held < (v + max_lag + 1 - u) * batch_size.  max_lag = 0 is synchronous PPO.
                `admission = "mean"` has the learner's version u in the place of v, and the take enforces nothing then:
                so max_lag bounds the mean, as in AReaL (https://arxiv.org/abs/2505.24298), and no single token.
    the take    first in, first out by age, whole units only; max_lag is enforced here, token by token.
                `too_old = "wait"` and "windowed" hold it in the order of issue, or nearly (window.py).
    leases      asking for batch u again gives batch u again, until version u + 1 is published.

Admission by example, with batch_size = 4, max_lag = 1 and one engine:

    u  v  held     bound
    0  0  0 to 7   (0 + 2 - 0) * 4 = 8   slots 0 to 7 open, and slot 8 does not
    0  0  8        (0 + 2 - 0) * 4 = 8   batch 0 is leased: its slots are held until they are consumed
    1  0  4        (0 + 2 - 1) * 4 = 4   version 1 is published: the engine, which has not swapped, gets none
    1  1  4 to 7   (1 + 2 - 1) * 4 = 8   the engine has swapped: slots 8 to 11 open
    1  1  7        (1 + 2 - 1) * 4 = 8   slot 5 is abandoned: slot 12 opens in its place

Segments have rules of their own (segments.py). The states of a slot are drawn in slot.py. Every change is noted in
`QueueState.pending_changes`, for the journal.
"""

import heapq
from collections.abc import Sequence
from itertools import islice

from streamppo.config.correction import Resample
from streamppo.errors import QueueError
from streamppo.process import phase
from streamppo.queue.rules import segments
from streamppo.queue.rules.failures import FailureWindow
from streamppo.queue.rules.records import DeadLetter, EndedAttempt, Ending
from streamppo.queue.rules.slot import (
    ABANDONED,
    ISSUED,
    OPEN,
    READY,
    Slot,
    TrajectoryRecord,
    Unit,
    all_younger,
    count_older,
    newest_version,
)
from streamppo.queue.rules.state import NEVER, QueueSettings, QueueState, TicketRequest
from streamppo.queue.rules.validation import TokenLimits, defect, defects
from streamppo.queue.rules.window import units_in_window
from streamppo.types import Batch, Failure, Identity, Ticket, Trajectory


class QueueRules:
    """Operates on `state`. `limits` are set when the model is there, which is before anything can arrive."""

    def __init__(self, settings: QueueSettings, state: QueueState) -> None:
        self.settings = settings
        self.state = state
        self.limits: TokenLimits | None = None
        self._recent = FailureWindow(settings.max_failure_rate)

    # --- rollout's side --------------------------------------------------------------------------------------

    @phase("issue")
    def issue(self, actor: str, engine_version: int, limit: int, call: int) -> tuple[Ticket, ...]:
        """Up to `limit` tickets for `actor`: slots to be sampled again first, oldest first, then new ones.

        The same `call` again gives the same tickets. Raises `QueueError` for an actor that was given up for dead.
        """
        if actor in self.state.fenced:
            raise QueueError(f"{actor} was given up for dead: it gets no tickets")
        last, slots = self.state.calls.get(actor, NEVER)
        if call < last:
            return ()
        if call > last:
            slots = list[Slot]()
            while len(slots) < limit and self.has_ticket(engine_version):
                slot = self._next_open()
                slot.issue(actor, call)
                self.state.issues(slot)
                self._touch(slot)
                slots.append(slot)
            if slots:
                self.state.calls[actor] = TicketRequest(call, slots)
        mine = [slot for slot in slots if slot.actor == actor and slot.call == call]
        return tuple([Ticket(identity=slot.identity, slot=slot.number) for slot in mine])

    def has_ticket(self, engine_version: int) -> bool:
        """Say if `issue` has a ticket for an engine of that version: a slot to be sampled again, or room for a new one.

        All versions above one that has a ticket have one too.
        """
        state, settings = self.state, self.settings
        while state.open and state.open[0].state is not OPEN:
            heapq.heappop(state.open)
        if settings.segments and (cut := segments.last_cut(state)) is not None:
            engine_version = min(engine_version, cut)
        if not settings.hard:
            engine_version = state.version
        lag = settings.admitted_lag(state.admitted_lag)
        bound = (engine_version + lag + 1 - state.version) * settings.batch_size
        held = state.held + segments.expected_cuts(settings, state)
        if held < bound or not state.open:
            return held < bound
        # The tokens of an engine that is behind would be older than those that the slot was opened for.
        is_strict = settings.segments is not None or settings.window is not None
        return not (is_strict and engine_version < state.version and held > bound)

    @phase("store")
    def put_all(self, trajectories: Sequence[Trajectory]) -> None:
        """Store finished trajectories, each as `put` does; those of a delivery are looked at all at once."""
        self._put_all(trajectories, defects(trajectories, self.limits))

    def put_records(self, records: Sequence[TrajectoryRecord]) -> None:
        """Store the records of finished trajectories, which a shard has looked at."""
        self._put_all(records, [record.defect or None for record in records])

    def put(self, trajectory: Trajectory) -> bool:
        """Store a finished trajectory. False if nobody waits for it: delivered twice, or by one given up for dead.

        A trajectory that cannot be trained on is a dead letter, and a failure of its slot.
        Raises `QueueError` for tokens of a version that was never published: then none of a delivery is stored.
        """
        return self._put_all([trajectory], [defect(trajectory, self.limits)]) == 1

    def _put_all(self, trajectories: Sequence[Trajectory], reasons: Sequence[str | None]) -> int:
        """Store what has no reason against it. Returns how many trajectories that is."""
        judged = list(zip(trajectories, reasons, strict=True))
        sound = [trajectory for trajectory, reason in judged if not reason]
        if sound and (newest := newest_version(sound)) > self.state.version:
            raise QueueError(f"{sound[0].actor} sampled with version {newest}, which the ledger does not know")
        return sum([self._put(trajectory, reason) for trajectory, reason in judged])

    def _put(self, trajectory: Trajectory, reason: str | None) -> bool:
        slot = self._find_issued(trajectory.identity)
        if slot is None:
            self._count_delivered(trajectory.num_sampled, "duplicates")
            return False
        if reason:
            self._count_delivered(trajectory.num_sampled, "dead_letters")
            self.state.pending_changes.dead_letters.append(DeadLetter(trajectory=trajectory, reason=reason))
            self.state.counts["dead_letters"] += 1
            self._fail(slot, "dead_letter", "engine", reason)
            return False
        self._count_delivered(trajectory.num_sampled)
        if trajectory.finish == "cut":
            self._open_next_part(slot)
        else:
            self._recent.add(slot, None)
        self.state.returns(slot)
        slot.store(trajectory)
        self._touch(slot)
        slot.unit.missing -= 1
        self.state.counts["stored"] += 1
        if slot.unit.missing == 0:
            self._complete(slot.unit)
        return True

    def cut_for(self, actor: str, version: int) -> None:
        """Note that `actor` has delivered all that was due to be cut for `version`."""
        self.state.cut_for[actor] = max(version, self.state.cut_for.get(actor, version))

    def fail(self, failure: Failure) -> None:
        """Open the slot again, or abandon it. Raises `TooManyFailures` above the configured rate."""
        slot = self._find_issued(failure.identity)
        self._count_delivered(failure.tokens, "failed" if slot else "duplicates")
        if slot is not None:
            self._fail(slot, "failed", failure.stage, failure.reason)

    def mark_dead(self, actor: str) -> None:
        """Give `actor` up for dead, for ever: its slots are sampled again. No failure of the task."""
        self.state.fenced.add(actor)
        self.state.calls.pop(actor, None)
        self.state.cut_for.pop(actor, None)
        issued = [slot for slot in self.state.slots.values() if slot.actor == actor]
        for slot in issued:
            self.state.counts["lost"] += 1
            self._reopen(slot, "lost", f"{actor} was given up for dead")

    def lost_all(self) -> None:
        """Nobody is left of those who were sampling; all of it is sampled again."""
        for actor in {slot.actor for slot in self.state.slots.values() if slot.actor is not None}:
            self.mark_dead(actor)
        # Fenced actors went with the rest, and the names are free for others.
        self.state.fenced.clear()

    # --- the learner's side ----------------------------------------------------------------------------------

    @phase("take")
    def take(self, version: int, *, leased_only: bool = False) -> Batch | None:
        """Lease the batch of the update from `version`, or None while it is not whole.

        With `leased_only` no new batch is leased. Raises `QueueError` unless that update runs now or comes next.
        """
        state = self.state
        if version in state.leases:
            return state.leases[version].batch
        if not state.version <= version <= state.version + 1:
            raise QueueError(f"batch {version} was asked for at version {state.version}")
        if leased_only:
            return None
        min_version = self.settings.min_version(version)
        chosen = self._choose_segments(min_version) if self.settings.segments else self._choose(min_version)
        if chosen is None:
            return None
        units, masked_tokens = chosen
        leased = state.lease(version, min_version, units)
        state.ready_units -= len(units)
        state.pending_changes.leases.append(version)
        state.counts["masked_tokens"] += masked_tokens
        return leased

    def leased_batch(self, version: int) -> Batch:
        """The batch of `version`. Raises `QueueError` if it is not leased."""
        if version not in self.state.leases:
            raise QueueError(f"version {version + 1} was made without the batch of version {version}")
        return self.state.leases[version].batch

    def publish(self, version: int, admitted_lag: int | None = None) -> None:
        """Consume the batch that made `version`, which exists from here on. The same version again is a no-op.

        `admitted_lag` is the lag to be admitted from here on, where the learner steers it.
        """
        state = self.state
        if version == state.version:
            return
        if version != state.version + 1:
            raise QueueError(f"version {version} was published after version {state.version}")
        batch = self.leased_batch(state.version)
        state.counts["consumed"] += len(batch.trajectories)
        state.tokens["consumed"] += _num_sampled(batch.trajectories)
        state.consume(state.version)
        state.version, state.admitted_lag = version, admitted_lag

    # --- the pieces ------------------------------------------------------------------------------------------

    def _next_open(self) -> Slot:
        """The slot of a ticket that there is."""
        if not self.state.open:
            self._open_unit()
        return heapq.heappop(self.state.open)

    def _open_unit(self) -> None:
        state, size = self.state, self.settings.unit_size
        unit = Unit([], missing=size)
        state.units[state.opened, 0] = unit
        for number in range(state.opened, state.opened + size):
            prompt, sample = divmod(number, self.settings.samples_per_prompt)
            slot = Slot(number, Identity(task=self.settings.task, prompt=prompt, sample=sample), unit)
            unit.slots.append(slot)
            state.slots[prompt, sample] = slot
            self._touch(slot)
            heapq.heappush(state.open, slot)
        state.opened += size

    def _open_next_part(self, slot: Slot) -> None:
        """Wait for the rest of the completion, of which a segment has come."""
        following = slot.open_next_segment()
        self.state.units[following.place] = following.unit
        self.state.slots[slot.identity.prompt, slot.identity.sample] = following
        self.state.issues(following)
        self.state.counts["cut"] += 1
        self._touch(following)

    def _find_issued(self, identity: Identity) -> Slot | None:
        """The slot that waits for the trajectory of `identity`, or else None and a duplicate more."""
        slot = self.state.slots.get((identity.prompt, identity.sample))
        if slot is None or slot.state is not ISSUED or slot.identity != identity:
            self.state.counts["duplicates"] += 1
            return None
        return slot

    def _fail(self, slot: Slot, ending: Ending, stage: str, reason: str) -> None:
        self.state.failed[stage] += 1
        why = f"{stage}: {reason}"
        self._recent.add(slot, why)
        slot.failures += 1
        if slot.failures < self.settings.max_attempts:
            self._reopen(slot, ending, why)
        else:
            self._abandon(slot.unit, "abandoned", f"sample {slot.identity.sample} failed {slot.failures} times: {why}")
        self._recent.check()

    def _reopen(self, slot: Slot, ending: Ending, reason: str) -> None:
        """End the attempt; another one is to be made."""
        self._end(slot, ending, reason)
        if slot.state is READY:
            slot.unit.missing += 1
        self.state.returns(slot)
        slot.reopen()
        self._touch(slot)
        heapq.heappush(self.state.open, slot)

    def _complete(self, unit: Unit) -> None:
        """Count a unit whose trajectories are all there, or abandon it if it teaches nothing."""
        if self.settings.resample and (reason := _teaches_nothing(unit.trajectories, self.settings.resample)):
            self._abandon(unit, "resampled", reason)
        else:
            self.state.ready_units += 1

    def _abandon(self, unit: Unit, ending: Ending, reason: str) -> None:
        self.state.abandoned += len(unit.slots)
        self.state.dropped[ending] += len(unit.slots)
        self.state.tokens[ending] += _num_sampled(unit.trajectories)
        self.state.forget(unit)
        for slot in unit.slots:
            self.state.returns(slot)
            slot.move(ABANDONED)
            self._end(slot, ending, reason)
            self.state.pending_changes.slots.pop(slot.place, None)
            self.state.pending_changes.gone.append(slot.place)
        unit.end()

    def _choose(self, min_version: int) -> tuple[list[Unit], int] | None:
        """The units of a batch, oldest first, and how many of their tokens are too old to be trained on.

        Units without enough young tokens are opened again on the way. None while there is no whole batch.
        """
        wanted = self.settings.batch_units
        if self.state.ready_units < wanted:
            return None
        first = list(islice(units_in_window(self.settings, self.state), wanted))
        if len(first) == wanted and all_younger(first, min_version):
            return first, 0
        chosen: list[Unit] = []
        masked_tokens = 0
        for unit in units_in_window(self.settings, self.state):
            masked = self._stale_tokens(unit, min_version)
            if masked is not None:
                chosen.append(unit)
                masked_tokens += masked
            if len(chosen) == wanted:
                return chosen, masked_tokens
        return None

    def _choose_segments(self, min_version: int) -> tuple[list[Unit], int] | None:
        """The segments of a batch, and how many of their tokens are too old. None while there is no whole batch.

        A segment that has no others is given up: its rest is sampled already.
        """
        just_in_time = self.settings.segments and self.settings.segments.just_in_time
        if just_in_time and segments.is_behind(self.settings, self.state, min_version):
            return None
        units, masked_tokens, given_up = segments.choose(self.state, min_version, self.settings.batch_size)
        for unit in given_up:
            self.state.ready_units -= 1
            self._abandon(unit, "too_old", f"all of it was sampled before version {min_version}")
        return (units, masked_tokens) if len(units) == self.settings.batch_size else None

    def _stale_tokens(self, unit: Unit, min_version: int) -> int | None:
        """Tokens of a ready unit that are too old; None if it cannot be trained on, and all of it is opened again."""
        ages = [count_older(trajectory, min_version) for trajectory in unit.trajectories]
        if self.settings.too_old == "mask":
            too_old = any(old == sampled for old, sampled in ages)
        else:
            too_old = any(old for old, _ in ages)
        if not too_old:
            return sum(old for old, _ in ages)
        self.state.ready_units -= 1
        self.state.dropped["too_old"] += len(unit.slots)
        self.state.tokens["too_old"] += _num_sampled(unit.trajectories)
        oldest = min(trajectory.oldest_version for trajectory in unit.trajectories)
        for slot in unit.slots:
            self._reopen(slot, "too_old", f"sampled by versions from {oldest} on, {min_version} is the oldest allowed")
        return None

    def _count_delivered(self, tokens: int, end: str | None = None) -> None:
        """Enter `tokens` in the ledger; under `end` too if they came to their end in arriving."""
        self.state.tokens["delivered"] += tokens
        if end is not None:
            self.state.tokens[end] += tokens

    def _end(self, slot: Slot, ending: Ending, reason: str) -> None:
        if ending != "too_old":
            # Its segments are trained on: what they were sampled from is no less true.
            self.state.counts["orphaned"] += slot.identity.segment
        ended = EndedAttempt(number=slot.number, identity=slot.identity, state=ending, reason=reason)
        self.state.pending_changes.ended.append(ended)

    def _touch(self, slot: Slot) -> None:
        self.state.pending_changes.slots[slot.place] = slot


def _num_sampled(trajectories: Sequence[Trajectory]) -> int:
    """The tokens of all of them that the policy sampled."""
    return sum(trajectory.num_sampled for trajectory in trajectories)


def _teaches_nothing(group: Sequence[Trajectory], resample: Resample) -> str | None:
    """The reason why a group is not trained on, or None. Each trajectory has the component, by `defects.defect`."""
    name = resample.component
    values = [one.components[name] if name else one.reward for one in group]
    what = f"values of {name!r}" if name else "rewards"
    if len(set(values)) == 1:
        return f"all {what} are {values[0]:g}"
    mean = sum(values) / len(values)
    if resample.mean and not resample.mean[0] <= mean <= resample.mean[1]:
        return f"the mean of the {what}, {mean:g}, is outside of {resample.mean[0]:g} to {resample.mean[1]:g}"
    return None
