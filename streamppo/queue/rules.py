"""The queue's rules: what may be sampled, what waits, what an update trains on. Pure: no Ray, no clock.

Update u trains from version u to version u + 1 and leases batch u; the lag of a token is u minus its version.

    admission   an engine of version v may hold slots for the updates up to v + max_lag: a slot opens while
                opened - abandoned - consumed < (v + max_lag + 1 - u) * batch_size.  max_lag = 0 is synchronous PPO.
    the take    first in, first out by age, whole units only; max_lag is enforced here, token by token.
    leases      asking for batch u again gives batch u again, until version u + 1 is published.

    memory      what changes is noted, for snapshot.py to write down.

The states of a slot are drawn in slot.py.
"""

import heapq
from collections import Counter, deque
from typing import Literal

from streamppo.errors import QueueError, TooManyFailures
from streamppo.queue.defects import Limits, defect
from streamppo.queue.records import GIVEN_UP, DeadLetter, Ended, Ending
from streamppo.queue.slot import Slot, Unit, count_older
from streamppo.types import Batch, Failure, Identity, QueueReport, Ticket, Trajectory, ints

WINDOW = 256
"""Slots over which the failure rate is taken."""
JUDGED_FROM = 64
"""Slots before which no rate is judged."""
DROPPED: tuple[Ending, ...] = ("too_old", *GIVEN_UP)
"""Why a trajectory that was stored was not trained on."""
NEVER: tuple[int, list[Slot]] = (-1, [])
"""The last request, and its slots, of an actor that has made none."""
QUOTED = 3
"""Different reasons that the error quotes."""


class QueueRules:
    """`whole_groups` keeps the `samples_per_prompt` trajectories of a prompt together.

    `resample_equal` gives up groups whose rewards are all equal, so that other prompts take their slots. `limits` are
    set when the model is there, which is before anything can arrive.
    """

    def __init__(
        self,
        *,
        task: str,
        batch_size: int,
        samples_per_prompt: int,
        max_lag: int,
        whole_groups: bool,
        too_old: Literal["mask", "drop", "wait"],
        max_attempts: int,
        max_failure_rate: float,
        resample_equal: bool = False,
    ) -> None:
        self.version = 0
        self.limits: Limits | None = None
        self._task = task
        self._batch_size = batch_size
        self._samples = samples_per_prompt
        self._max_lag = max_lag
        self._unit_size = samples_per_prompt if whole_groups else 1
        self._too_old = too_old
        self._max_attempts = max_attempts
        self._max_failure_rate = max_failure_rate
        self._resample_equal = resample_equal
        self._opened = 0
        self._abandoned = 0
        self._units: dict[int, Unit] = {}
        self._slots: dict[tuple[int, int], Slot] = {}
        self._open: list[Slot] = []
        self._ready_units = 0
        self._leases: dict[int, tuple[Batch, list[Unit]]] = {}
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._outcomes: deque[str | None] = deque(maxlen=WINDOW)
        self._calls: dict[str, tuple[int, list[Slot]]] = {}
        self._fenced: set[str] = set()
        self._touched: dict[int, Slot] = {}
        self._gone: list[int] = []
        self._new_leases: list[int] = []
        self._dead: list[DeadLetter] = []
        self._ended: list[Ended] = []

    # --- rollout's side --------------------------------------------------------------------------------------

    def issue(self, actor: str, engine_version: int, limit: int, call: int) -> tuple[Ticket, ...]:
        """Up to `limit` slots for `actor`: those to be sampled again first, oldest first, then new ones.

        The same `call` again gives the same tickets. Raises `QueueError` for an actor that was given up for dead.
        """
        if actor in self._fenced:
            raise QueueError(f"{actor} was given up for dead: it gets no tickets")
        last, slots = self._calls.get(actor, NEVER)
        if call < last:
            return ()
        if call > last:
            slots = list[Slot]()
            while len(slots) < limit and (slot := self._next_open(engine_version)):
                slot.actor, slot.call = actor, call
                self._touch(slot)
                slots.append(slot)
            if slots:
                self._calls[actor] = (call, slots)
        mine = [slot for slot in slots if (slot.actor, slot.call) == (actor, call)]
        return tuple(Ticket(identity=slot.identity, slot=slot.number) for slot in mine)

    def put(self, trajectory: Trajectory) -> bool:
        """Store a finished trajectory. False if nobody waits for it: delivered twice, or by one given up for dead.

        One that cannot be trained on is a dead letter, and a failure of its slot.
        Raises `QueueError` for tokens of a version that was never published.
        """
        slot = self._in_flight(trajectory.identity)
        if slot is None:
            return False
        if reason := defect(trajectory, self.limits):
            self._dead.append(DeadLetter(trajectory=trajectory, reason=reason))
            self._counts["dead_letters"] += 1
            self._fail(slot, "dead_letter", "engine", reason)
            return False
        if (newest := int(ints(trajectory.versions).max())) > self.version:
            raise QueueError(f"{trajectory.actor} sampled with version {newest}, which the ledger does not know")
        slot.trajectory, slot.actor = trajectory, None
        self._touch(slot)
        slot.unit.missing -= 1
        self._counts["stored"] += 1
        self._note(slot, None)
        if slot.unit.missing == 0:
            self._complete(slot.unit)
        return True

    def fail(self, failure: Failure) -> None:
        """Open the slot again, or abandon it. Raises `TooManyFailures` above the configured rate."""
        if (slot := self._in_flight(failure.identity)) is not None:
            self._fail(slot, "failed", failure.stage, failure.reason)

    def lost(self, actor: str) -> None:
        """`actor` is given up for dead, for ever: what it was sampling is sampled again. No failure of the task."""
        self._fenced.add(actor)
        self._calls.pop(actor, None)
        for slot in [slot for slot in self._slots.values() if slot.actor == actor]:
            self._counts["lost"] += 1
            self._reopen(slot, "lost", f"{actor} was given up for dead")

    # --- the learner's side ----------------------------------------------------------------------------------

    def take(self, version: int, *, leased_only: bool = False) -> Batch | None:
        """The batch of the update from `version`, or None while it is not whole.

        With `leased_only` none that nobody has yet. Raises `QueueError` unless that update runs now or comes next.
        """
        if version in self._leases:
            return self._leases[version][0]
        if not self.version <= version <= self.version + 1:
            raise QueueError(f"batch {version} was asked for at version {self.version}")
        if leased_only:
            return None
        min_version = version - self._max_lag
        units = self._choose(min_version)
        if units is None:
            return None
        for unit in units:
            self._forget(unit)
        self._ready_units -= len(units)
        chosen = tuple(trajectory for unit in units for trajectory in unit.trajectories)
        self._counts["masked_tokens"] += sum(count_older(trajectory, min_version)[0] for trajectory in chosen)
        batch = Batch(version=version, min_version=min_version, trajectories=chosen)
        self._leases[version] = (batch, units)
        self._new_leases.append(version)
        return batch

    def publish(self, version: int) -> None:
        """`version` exists: the batch that made it is consumed. The same version again is a no-op."""
        if version == self.version:
            return
        if version != self.version + 1:
            raise QueueError(f"version {version} was published after version {self.version}")
        lease = self._leases.pop(self.version, None)
        if lease is None:
            raise QueueError(f"version {version} was made without the batch of version {self.version}")
        self._counts["consumed"] += len(lease[0].trajectories)
        self._counts["consumed_tokens"] += sum(trajectory.num_tokens for trajectory in lease[0].trajectories)
        self._gone += [slot.number for unit in lease[1] for slot in unit.slots]
        self.version = version

    # --- what people ask -------------------------------------------------------------------------------------

    def report(self) -> QueueReport:
        """Counters since the start, and what the queue holds."""
        counts = self._counts
        return QueueReport(
            version=self.version,
            ready=sum(slot.trajectory is not None for slot in self._slots.values()),
            in_flight=sum(slot.actor is not None for slot in self._slots.values()),
            issued=self._opened,
            stored=counts["stored"],
            consumed=counts["consumed"],
            duplicates=counts["duplicates"],
            dead_letters=counts["dead_letters"],
            dropped={reason: self._dropped[reason] for reason in DROPPED} | {"lost": counts["lost"]},
            masked_tokens=counts["masked_tokens"],
            failed=dict(self._failed),
            mean_tokens_consumed=counts["consumed_tokens"] / max(1, counts["consumed"]),
            mean_tokens_dropped=counts["dropped_tokens"] / max(1, self._dropped["too_old"]),
        )

    def waiting_for(self) -> str:
        """What the next batch waits for, in one sentence."""
        flying = Counter(slot.actor for slot in self._slots.values() if slot.actor is not None)
        where = ", ".join(f"{count} at {actor}" for actor, count in sorted(flying.items())) or "none"
        landed = sum(slot.trajectory is not None for slot in self._slots.values())
        ready = self._ready_units * self._unit_size
        leased = ", ".join(map(str, sorted(self._leases))) or "none"
        return (
            f"is at version {self.version} with {ready} of {self._batch_size} trajectories ready, "
            f"{len(self._slots) - sum(flying.values()) - landed} to be sampled, in flight: {where}, "
            f"batches leased: {leased}"
        )

    # --- the pieces ------------------------------------------------------------------------------------------

    def _next_open(self, engine_version: int) -> Slot | None:
        while self._open:
            slot = heapq.heappop(self._open)
            if not slot.unit.abandoned:
                return slot
        alive = self._opened - self._abandoned - self._counts["consumed"]
        if alive >= (engine_version + self._max_lag + 1 - self.version) * self._batch_size:
            return None
        self._open_unit()
        return heapq.heappop(self._open)

    def _open_unit(self) -> None:
        unit = Unit(missing=self._unit_size)
        self._units[self._opened] = unit
        for number in range(self._opened, self._opened + self._unit_size):
            prompt, sample = divmod(number, self._samples)
            slot = Slot(number, Identity(task=self._task, prompt=prompt, sample=sample), unit)
            unit.slots.append(slot)
            self._slots[prompt, sample] = slot
            self._touch(slot)
            heapq.heappush(self._open, slot)
        self._opened += self._unit_size

    def _in_flight(self, identity: Identity) -> Slot | None:
        slot = self._slots.get((identity.prompt, identity.sample))
        if slot is None or slot.actor is None or slot.identity != identity:
            self._counts["duplicates"] += 1
            return None
        return slot

    def _fail(self, slot: Slot, state: Ending, stage: str, reason: str) -> None:
        self._failed[stage] += 1
        why = f"{stage}: {reason}"
        self._note(slot, why)
        slot.failures += 1
        if slot.failures < self._max_attempts:
            self._reopen(slot, state, why)
        else:
            self._abandon(slot.unit, "abandoned", f"sample {slot.identity.sample} failed {slot.failures} times: {why}")
        self._judge()

    def _reopen(self, slot: Slot, state: Ending, reason: str) -> None:
        """The attempt has ended in `state`; another one is to be made."""
        self._end(slot, state, reason)
        if slot.trajectory is not None:
            slot.unit.missing += 1
        slot.reopen()
        self._touch(slot)
        heapq.heappush(self._open, slot)

    def _complete(self, unit: Unit) -> None:
        """All trajectories of a unit are there."""
        rewards = {trajectory.reward for trajectory in unit.trajectories}
        if self._resample_equal and len(rewards) == 1:
            self._abandon(unit, "equal_group", f"all rewards are {rewards.pop():g}")
        else:
            self._ready_units += 1

    def _abandon(self, unit: Unit, state: Ending, reason: str) -> None:
        unit.abandoned = True
        self._abandoned += len(unit.slots)
        self._dropped[state] += len(unit.slots)
        self._forget(unit)
        for slot in unit.slots:
            self._end(slot, state, reason)
            self._touched.pop(slot.number, None)
            self._gone.append(slot.number)

    def _forget(self, unit: Unit) -> None:
        for slot in unit.slots:
            del self._slots[slot.identity.prompt, slot.identity.sample]
        del self._units[unit.slots[0].number]

    def _choose(self, min_version: int) -> list[Unit] | None:
        """The units of a batch, oldest first, after what is too old has been sent to be sampled again."""
        wanted = self._batch_size // self._unit_size
        if self._ready_units < wanted:
            return None
        chosen: list[Unit] = []
        for unit in self._units.values():
            if unit.missing == 0 and self._useful(unit, min_version):
                chosen.append(unit)
            elif self._too_old == "wait":
                return None
            if len(chosen) == wanted:
                return chosen
        return None

    def _useful(self, unit: Unit, min_version: int) -> bool:
        """Whether a ready unit may be trained on; if not, all of it is opened again."""
        ages = [count_older(trajectory, min_version) for trajectory in unit.trajectories]
        if self._too_old == "mask":
            useless = any(old == sampled for old, sampled in ages)
        else:
            useless = any(old for old, _ in ages)
        if not useless:
            return True
        self._ready_units -= 1
        self._dropped["too_old"] += len(unit.slots)
        self._counts["dropped_tokens"] += sum(trajectory.num_tokens for trajectory in unit.trajectories)
        oldest = min(trajectory.oldest_version for trajectory in unit.trajectories)
        for slot in unit.slots:
            self._reopen(slot, "too_old", f"sampled by versions from {oldest} on, {min_version} is the oldest allowed")
        return False

    def _end(self, slot: Slot, state: Ending, reason: str) -> None:
        self._ended.append(Ended(number=slot.number, identity=slot.identity, state=state, reason=reason))

    def _touch(self, slot: Slot) -> None:
        self._touched[slot.number] = slot

    def _note(self, slot: Slot, reason: str | None) -> None:
        """A slot counts once, by its first attempt: prompts that always fail are tried again before others."""
        if slot.failures == 0:
            self._outcomes.append(reason)

    def _judge(self) -> None:
        reasons = [reason for reason in self._outcomes if reason is not None]
        rate = len(reasons) / max(1, len(self._outcomes))
        if len(self._outcomes) >= JUDGED_FROM and rate > self._max_failure_rate:
            quoted = "; ".join(list(dict.fromkeys(reasons))[:QUOTED])
            raise TooManyFailures(
                f"{rate:.0%} of the last {len(self._outcomes)} trajectories failed "
                f"(queue.max_failure_rate is {self._max_failure_rate:.0%}): {quoted}"
            )
