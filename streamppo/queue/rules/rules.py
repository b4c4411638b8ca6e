"""The queue's rules for admission, for taking a batch ("the take") and for leases. Pure: no Ray, no clock, no disk.

Update u trains from version u to version u + 1 and leases batch u. The lag of a token is u minus the token's version.

    admission   an engine of version v may hold slots for the updates up to v + max_lag: a slot opens while
                held < (v + max_lag + 1 - u) * batch_size.  max_lag = 0 is synchronous PPO.
                `ahead = "as_needed"` replaces max_lag by the lag that the learner needs (ahead.py).
                `admission = "mean"` replaces v by the learner's version u, and the take does not enforce max_lag:
                it bounds the mean lag, as in AReaL (https://arxiv.org/abs/2505.24298), not the lag of each token.
    the take    takes only complete units, the oldest first, and enforces max_lag for every token.
                `too_old = "wait"` keeps the order of issue, "windowed" keeps it within a window (take.py).
    leases      until version u + 1 is published, every take of batch u returns the same batch.

Admission by example, with batch_size = 4, max_lag = 1 and one engine:

    u  v  held     bound
    0  0  0 to 7   (0 + 2 - 0) * 4 = 8   slots 0 to 7 open, and slot 8 does not
    0  0  8        (0 + 2 - 0) * 4 = 8   batch 0 is leased: its slots are held until they are consumed
    1  0  4        (0 + 2 - 1) * 4 = 4   version 1 is published: the engine has not swapped and gets no slot
    1  1  4 to 7   (1 + 2 - 1) * 4 = 8   the engine has swapped: slots 8 to 11 open
    1  1  7        (1 + 2 - 1) * 4 = 8   slot 5 is abandoned: slot 12 opens

take.py has the rules for segments, slot.py the states of a slot. Every change is added to `QueueState.pending_changes`.
"""

import heapq
from collections.abc import Sequence

from streamppo.errors import QueueError
from streamppo.process import phase
from streamppo.queue.rules import take
from streamppo.queue.rules.curriculum import RowCurriculum, no_signal_reason
from streamppo.queue.rules.records import DeadLetter, Ending, ended_attempt
from streamppo.queue.rules.slot import (
    ABANDONED,
    ISSUED,
    OPEN,
    READY,
    FailedAttempt,
    FailureWindow,
    Slot,
    TrajectoryRecord,
    Unit,
    newest_version,
)
from streamppo.queue.rules.state import NEVER, QueueSettings, QueueState, TicketRequest
from streamppo.queue.rules.validation import TokenLimits, defects
from streamppo.types import Batch, Failure, Identity, Ticket, Trajectory


class QueueRules:
    """Changes `state` by the rules. `limits` depends on the model, and is set before the first delivery."""

    def __init__(self, settings: QueueSettings, state: QueueState) -> None:
        self.settings = settings
        self.state = state
        self.limits: TokenLimits | None = None
        self._recent = FailureWindow(settings.max_failure_rate)
        self.curriculum: RowCurriculum | None = None
        if settings.curriculum is not None:
            self.curriculum = RowCurriculum(settings.curriculum, settings, state)
        elif state.rows is not None:
            state.forget_rows()

    @phase("issue")
    def issue(self, actor: str, engine_version: int, limit: int, call: int) -> tuple[Ticket, ...]:
        """Issue up to `limit` tickets, reopened slots first; the same for a repeated `call`. Raises `QueueError`."""
        if actor in self.state.fenced:
            raise QueueError(f"{actor} was marked dead: it gets no tickets")
        last, slots = self.state.calls.get(actor, NEVER)
        if call < last:
            return ()
        if call > last:
            slots = list[Slot]()
            while len(slots) < limit and self.has_ticket(engine_version):
                if not self.state.open:
                    self._open_unit()
                slot = heapq.heappop(self.state.open)
                slot.issue(actor, call)
                self.state.issues(slot)
                self._touch(slot)
                slots.append(slot)
            if slots:
                self.state.calls[actor] = TicketRequest(call, slots)
        issued = [slot for slot in slots if slot.actor == actor and slot.call == call]
        return tuple([Ticket(identity=slot.identity, slot=slot.number) for slot in issued])

    def has_ticket(self, engine_version: int) -> bool:
        """True if `issue` can give a slot to an engine of this version, and so to an engine of any later version."""
        state, settings = self.state, self.settings
        while state.open and state.open[0].state is not OPEN:
            heapq.heappop(state.open)
        if settings.segments and (cut := state.last_cut) is not None:
            engine_version = min(engine_version, cut)
        if not settings.hard:
            engine_version = state.version
        lag = settings.admitted_lag(state.admitted_lag, state.needed.lag)
        bound = (engine_version + lag + 1 - state.version) * settings.batch_size
        held = state.held + state.expected_cuts(settings)
        if held < bound or not state.open:
            return held < bound
        # An engine of an older version would sample tokens that are older than the slot was admitted for.
        is_strict = settings.segments is not None or settings.window is not None
        return not (is_strict and engine_version < state.version and held > bound)

    @phase("store")
    def put(self, trajectories: Sequence[Trajectory]) -> int:
        """Store a delivery; return the number stored. Raises `QueueError` for tokens of an unpublished version."""
        return self._put_all(trajectories, defects(trajectories, self.limits))

    def put_records(self, records: Sequence[TrajectoryRecord]) -> None:
        """Store the records of finished trajectories, which a shard has validated."""
        self._put_all(records, [record.defect or None for record in records])

    def _put_all(self, trajectories: Sequence[Trajectory], reasons: Sequence[str | None]) -> int:
        judged = list(zip(trajectories, reasons, strict=True))
        sound = [trajectory for trajectory, reason in judged if not reason]
        if sound and (newest := newest_version(sound)) > self.state.version:
            raise QueueError(f"{sound[0].actor} sampled with version {newest}, which was not published")
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
            refused = FailedAttempt("engine", trajectory.num_sampled, -1, trajectory.source)
            self._fail(slot, "dead_letter", reason, refused)
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
        self.state.cut_for[actor] = max(version, self.state.cut_for.get(actor, version))

    def fail(self, failure: Failure) -> None:
        """Reopen the slot, or abandon it after `max_attempts`. Raises `TooManyFailures` above `max_failure_rate`."""
        slot = self._find_issued(failure.identity)
        self._count_delivered(failure.tokens, "failed" if slot else "duplicates")
        if slot is not None:
            attempt = FailedAttempt(failure.stage, failure.tokens, failure.version, failure.source)
            self._fail(slot, "failed", failure.reason, attempt)

    def mark_dead(self, actor: str) -> None:
        """Mark `actor` dead forever, and reopen its slots; this does not count as a failure of the slots."""
        self.state.fenced.add(actor)
        self.state.calls.pop(actor, None)
        self.state.cut_for.pop(actor, None)
        issued = [slot for slot in self.state.slots.values() if slot.actor == actor]
        for slot in issued:
            self.state.counts["lost"] += 1
            self._reopen(slot, "lost", f"{actor} was marked dead")

    def reopen_all(self) -> None:
        """Reopen all issued slots, because all actors have ended."""
        if self.curriculum:
            self.curriculum.begin()
        for actor in {slot.actor for slot in self.state.slots.values() if slot.actor is not None}:
            self.mark_dead(actor)
        # Actors that were marked dead have ended too, so new actors may use their names.
        self.state.fenced.clear()

    @phase("take")
    def take(self, version: int, *, leased_only: bool = False) -> Batch | None:
        """Lease the batch of the update that starts at `version`; None while it is incomplete. Raises `QueueError`."""
        state = self.state
        if version in state.leases:
            return state.leases[version].batch
        if not state.version <= version <= state.version + 1:
            raise QueueError(f"batch {version} was requested at version {state.version}")
        if leased_only:
            return None
        min_version = self.settings.min_version(version)
        units, masked_tokens, too_old = take.choose(self.settings, state, min_version)
        for unit in too_old:
            self._end_too_old(unit, min_version)
        if not units:
            return None
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
        """Make `version` the newest and consume its batch, once. `admitted_lag` is the lag to admit, if adaptive."""
        state = self.state
        if version == state.version:
            return
        if version != state.version + 1:
            raise QueueError(f"version {version} was published after version {state.version}")
        batch, is_full = self.leased_batch(state.version), not self.has_ticket(state.version)
        if self.curriculum:
            self.curriculum.count_groups(batch.trajectories)
        state.counts["consumed"] += len(batch.trajectories)
        state.tokens["consumed"] += _num_sampled(batch.trajectories)
        state.consume(state.version)
        state.version, state.admitted_lag = version, admitted_lag
        if self.settings.as_needed:
            has_surplus = state.held > (state.needed.lag + 1) * self.settings.batch_size
            left_over = state.ready_units // self.settings.batch_units if state.version in state.leases else None
            state.needed.follow(left_over, is_full=is_full, has_surplus=has_surplus, at_most=self.settings.flow_lag)

    def _open_unit(self) -> None:
        state, size = self.state, self.settings.unit_size
        while self.curriculum and (count := self.curriculum.skip_count(state.opened // size)):
            state.skip(size, count)
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
        following = slot.open_next_segment()
        self.state.units[following.place] = following.unit
        self.state.slots[slot.identity.prompt, slot.identity.sample] = following
        self.state.issues(following)
        self.state.counts["cut"] += 1
        self._touch(following)

    def _find_issued(self, identity: Identity) -> Slot | None:
        slot = self.state.slots.get((identity.prompt, identity.sample))
        if slot is None or slot.state is not ISSUED or slot.identity != identity:
            self.state.counts["duplicates"] += 1
            return None
        return slot

    def _fail(self, slot: Slot, ending: Ending, reason: str, attempt: FailedAttempt) -> None:
        self.state.failed[attempt.stage] += 1
        slot.failed, reason = attempt, f"{attempt.stage}: {reason}"
        self._recent.add(slot, reason)
        slot.failures += 1
        if slot.failures < self.settings.max_attempts:
            self._reopen(slot, ending, reason)
        else:
            text = f"sample {slot.identity.sample} failed {slot.failures} times: {reason}"
            self._abandon(slot.unit, "abandoned", text)
        self._recent.check()

    def _reopen(self, slot: Slot, ending: Ending, reason: str) -> None:
        self._end(slot, ending, reason)
        if slot.state is READY:
            slot.unit.missing += 1
        self.state.returns(slot)
        slot.reopen()
        self._touch(slot)
        heapq.heappush(self.state.open, slot)

    def _complete(self, unit: Unit) -> None:
        if self.settings.resample and (reason := no_signal_reason(unit.trajectories, self.settings.resample)):
            if self.curriculum:
                self.curriculum.count_resampled(unit.trajectories)
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
            self.state.pending_changes.removed.append(slot.place)
        unit.end()

    def _end_too_old(self, unit: Unit, min_version: int) -> None:
        """End a too old unit: reopen its slots. A segment is abandoned, because its completion has been continued."""
        self.state.ready_units -= 1
        if self.settings.segments:
            self._abandon(unit, "too_old", f"all of it was sampled before version {min_version}")
            return
        self.state.dropped["too_old"] += len(unit.slots)
        self.state.tokens["too_old"] += _num_sampled(unit.trajectories)
        oldest = min(trajectory.oldest_version for trajectory in unit.trajectories)
        for slot in unit.slots:
            self._reopen(slot, "too_old", f"sampled by versions from {oldest} on, {min_version} is the oldest allowed")

    def _count_delivered(self, tokens: int, end: str | None = None) -> None:
        self.state.tokens["delivered"] += tokens
        if end is not None:
            self.state.tokens[end] += tokens

    def _end(self, slot: Slot, ending: Ending, reason: str) -> None:
        if ending != "too_old":
            # The tokens of the attempt's earlier segments stay valid, and are trained on.
            self.state.counts["orphaned"] += slot.identity.segment
        self.state.pending_changes.ended.append(ended_attempt(slot, ending, reason, self.state.version))

    def _touch(self, slot: Slot) -> None:
        self.state.pending_changes.slots[slot.place] = slot


def _num_sampled(trajectories: Sequence[Trajectory]) -> int:
    return sum(trajectory.num_sampled for trajectory in trajectories)
