"""The data of a queue: its settings, which never change, and its state, which the rules change."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from streamppo.config.correction import Curriculum, Resample
from streamppo.config.queue import Segments
from streamppo.config.sections import Config
from streamppo.queue.rules.ahead import NeededLag
from streamppo.queue.rules.records import NO_ROWS, DeadLetter, EndedAttempt, GroupShape, KnownRows
from streamppo.queue.rules.slot import CONSUMED, ISSUED, LEASED, NO_CALL, Slot, Unit
from streamppo.tasks.order import RowNumbers
from streamppo.types import Batch, Trajectory


class QueueSettings(NamedTuple):
    """The queue that a configuration describes.

    `flow_lag` <= `max_lag` is the lag that admission aims at. `as_needed` lowers it to the smallest lag at which the
    learner does not wait (ahead.py). `whole_groups` keeps the `samples_per_prompt` trajectories of a prompt together.
    `resample`: which groups lack a learning signal and are replaced by other prompts; None keeps all groups.
    `curriculum` skips prompts of rows that had such groups; a sample with a reward of at least `correct_at` is right.
    With `segments`, each unit is one part of a slot. If `hard` is false, `max_lag` bounds only admission, computed with
    the learner's version, and batches take tokens of any age. An adaptive admitted lag begins at `first_lag`.
    """

    task: str
    batch_size: int
    samples_per_prompt: int
    max_lag: int
    flow_lag: int
    whole_groups: bool
    too_old: Literal["mask", "drop", "wait", "windowed", "keep"]
    max_attempts: int
    max_failure_rate: float
    resample: Resample | None = None
    curriculum: Curriculum | None = None
    correct_at: float = 1.0
    segments: Segments | None = None
    hard: bool = True
    first_lag: int | None = None
    as_needed: bool = False

    @property
    def judged(self) -> Resample:
        return self.resample or Resample()

    @property
    def unit_size(self) -> int:
        return self.samples_per_prompt if self.whole_groups else 1

    @property
    def batch_units(self) -> int:
        return self.batch_size // self.unit_size

    @property
    def window(self) -> int | None:
        """The window of the take in units, W in take.py; None means that any ready unit may be taken."""
        match self.too_old:
            case "wait":
                return 1
            case "windowed":
                return (self.max_lag - self.flow_lag) * self.batch_units + 1
            case "mask" | "drop" | "keep":
                return None

    def admitted_lag(self, adapted: int | None, needed: int) -> int:
        """The lag that admission aims at. `adapted` is the value that the learner has sent, or None."""
        lag = min(self.flow_lag, needed) if self.as_needed else self.flow_lag
        if self.first_lag is None:
            return lag
        return min(lag, self.first_lag if adapted is None else adapted)

    def min_version(self, version: int) -> int:
        """The oldest version whose tokens the batch of `version` may train on."""
        return version - self.max_lag if self.hard else 0

    @property
    def shape(self) -> GroupShape:
        """The settings that a run's journal fixes, because they determine the numbers of slots."""
        return GroupShape(self.task, self.samples_per_prompt, self.unit_size)


def queue_settings(config: Config) -> QueueSettings:
    """The queue that the configuration describes."""
    queue = config.queue
    return QueueSettings(
        task=str(config.task.__struct_config__.tag),
        batch_size=queue.batch_size,
        samples_per_prompt=queue.samples_per_prompt,
        max_lag=queue.bound,
        flow_lag=queue.flow_lag,
        whole_groups=config.algorithm.compares_samples is not None,
        resample=config.algorithm.resample if config.algorithm.zero_variance == "resample" else None,
        curriculum=config.algorithm.curriculum,
        correct_at=config.reward.correct_at,
        too_old=queue.too_old,
        max_attempts=queue.max_attempts,
        max_failure_rate=queue.max_failure_rate,
        segments=queue.segments,
        hard=queue.admission != "mean",
        first_lag=queue.first_lag,
        as_needed=queue.ahead == "as_needed" and queue.segments is None and queue.bound > 0,
    )


class LeasedBatch(NamedTuple):
    """The batch of one update, and its units."""

    batch: Batch
    units: Sequence[Unit]


class TicketRequest(NamedTuple):
    """An actor's last request that got tickets: its number `call`, and the tickets' slots."""

    call: int
    slots: list[Slot]


NEVER = TicketRequest(NO_CALL, [])
"""The last request of an actor that has not got tickets yet."""


@dataclass(slots=True)
class PendingChanges:
    """Changes since the last write to the journal: changed slots, removed slots, new leases, and endings.

    `slots` and `removed` identify a slot by (number, part). For the curriculum, `rows` is set if the rows are new,
    `zero_variance` has each changed z by row, and `skipped` has the z of each skipped prompt's row, by the prompt's
    first slot.
    """

    slots: dict[tuple[int, int], Slot] = field(default_factory=dict[tuple[int, int], Slot])
    removed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    leases: list[int] = field(default_factory=list[int])
    dead_letters: list[DeadLetter] = field(default_factory=list[DeadLetter])
    ended: list[EndedAttempt] = field(default_factory=list[EndedAttempt])
    zero_variance: dict[int, int] = field(default_factory=dict[int, int])
    skipped: dict[int, int] = field(default_factory=dict[int, int])
    rows: KnownRows | None = None


@dataclass(slots=True)
class QueueState:
    """The whole state of a queue.

    admitted_lag         the lag that the learner admits with this version; None if it has sent none
    needed               the lag that the learner needs, for `as_needed` (ahead.py)
    opened, abandoned    numbers of slots since the run began; all others are held or consumed
    units, slots         open, issued and ready ones, oldest first: units by the place of their first slot, slots by
                         (prompt, sample); for a slot with segments, its newest part
    open                 a heap of slots to be sampled, oldest first; abandoned slots are skipped when popped
    ready_units          the number of complete units
    leases               batches by version, until the next version is published
    issued               for each actor that samples, the number of its issued slots
    calls                the last request of each actor; a repeated request gets the same tickets
    fenced               actors that were marked dead
    cut_for              for each actor, the newest version for which all due segments were cut and have arrived
    rows, zero_variance  how prompts map to data rows, and the z of each row, unless it is 0 (curriculum.py)
    resampled            prompts whose groups were resampled since the version, and whether they count for z
    counts               dead_letters, stored, duplicates, lost, consumed, masked_tokens, skipped_prompts; for segments
                         also cut (another segment follows) and orphaned (the rest of the attempt failed or was lost)
    tokens               sampled tokens: all delivered, and by ending the delivered tokens that are no longer held
    dropped, failed      numbers of dropped slots by reason, and of failures by stage
    """

    version: int = 0
    admitted_lag: int | None = None
    needed: NeededLag = field(default_factory=NeededLag)
    opened: int = 0
    abandoned: int = 0
    ready_units: int = 0
    units: dict[tuple[int, int], Unit] = field(default_factory=dict[tuple[int, int], Unit])
    slots: dict[tuple[int, int], Slot] = field(default_factory=dict[tuple[int, int], Slot])
    open: list[Slot] = field(default_factory=list[Slot])
    leases: dict[int, LeasedBatch] = field(default_factory=dict[int, LeasedBatch])
    issued: Counter[str] = field(default_factory=Counter[str])
    calls: dict[str, TicketRequest] = field(default_factory=dict[str, TicketRequest])
    fenced: set[str] = field(default_factory=set[str])
    cut_for: dict[str, int] = field(default_factory=dict[str, int])
    rows: KnownRows | None = None
    zero_variance: dict[int, int] = field(default_factory=dict[int, int])
    resampled: dict[int, bool] = field(default_factory=dict[int, bool])
    counts: Counter[str] = field(default_factory=Counter[str])
    tokens: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    pending_changes: PendingChanges = field(default_factory=PendingChanges)

    @property
    def held(self) -> int:
        """The number of slots, or parts of slots, that are neither consumed nor abandoned; leased slots count too."""
        return self.opened + self.counts["cut"] - self.abandoned - self.counts["consumed"]

    @property
    def last_cut(self) -> int | None:
        """The newest version for which all sampling actors have delivered due segments; None if no actor samples."""
        return min((self.cut_for.get(actor, -1) for actor in self.issued), default=None)

    def expected_cuts(self, settings: QueueSettings) -> int:
        """Estimate the number of places that cuts by length will open, from the mean number of earlier cuts."""
        if settings.segments is None or not settings.segments.max_tokens:
            return 0
        cut, ended = self.counts["cut"], self.counts["stored"] - self.counts["cut"]
        return sum(self.issued.values()) * cut // max(1, ended)

    def first_prompt(self, samples_per_prompt: int) -> int:
        """The first prompt that has a held slot; if nothing is held, the next prompt to open."""
        leased = (slot for lease in self.leases.values() for unit in lease.units for slot in unit.slots)
        held = [*(prompt for prompt, _ in self.slots), *(slot.identity.prompt for slot in leased)]
        return min(held, default=self.opened // samples_per_prompt)

    def skip(self, slots: int, count: int) -> None:
        """Skip the next prompt: count its `slots` as opened and abandoned. `count` is the z of its data row."""
        self.pending_changes.skipped[self.opened] = count
        self.opened += slots
        self.abandoned += slots
        self.counts["skipped_prompts"] += 1

    def forget_rows(self) -> None:
        """Set the counts of all data rows to 0, because the data have changed or the curriculum has ended."""
        for row in [*self.zero_variance]:
            self.count_zero_variance(row, 0)
        self.record_rows(NO_ROWS)

    def record_rows(self, rows: RowNumbers) -> None:
        """Record how prompts map to rows. Unchanged rows keep the version from which their groups count."""
        is_same = self.rows is not None and rows.has_rows_of(self.rows.numbers)
        since = self.rows.since if self.rows is not None and is_same else self.version
        self.rows = self.pending_changes.rows = KnownRows(numbers=rows, since=since)

    def count_zero_variance(self, row: int, count: int) -> None:
        if count != self.zero_variance.get(row, 0):
            self.pending_changes.zero_variance[row] = count
        if count:
            self.zero_variance[row] = count
        else:
            self.zero_variance.pop(row, None)

    def issues(self, slot: Slot) -> None:
        assert slot.actor is not None
        self.issued[slot.actor] += 1

    def returns(self, slot: Slot) -> None:
        if slot.state is ISSUED and slot.actor is not None:
            self.issued[slot.actor] -= 1
            if not self.issued[slot.actor]:
                del self.issued[slot.actor]

    def forget(self, unit: Unit) -> None:
        for slot in unit.slots:
            key = slot.identity.prompt, slot.identity.sample
            # For a slot with segments, `slots` has only the newest part.
            if self.slots.get(key) is slot:
                del self.slots[key]
        del self.units[unit.slots[0].place]

    def lease(self, version: int, min_version: int, units: Sequence[Unit]) -> Batch:
        chosen: list[Trajectory] = []
        for unit in units:
            self.forget(unit)
            for slot in unit.slots:
                slot.move(LEASED)
            chosen += unit.trajectories
        batch = Batch(version=version, min_version=min_version, trajectories=tuple(chosen))
        self.leases[version] = LeasedBatch(batch, units)
        return batch

    def consume(self, version: int) -> None:
        for unit in self.leases.pop(version).units:
            for slot in unit.slots:
                slot.move(CONSUMED)
                self.pending_changes.removed.append(slot.place)
            unit.end()

    def waiting(self) -> Iterator[Slot]:
        return (slot for unit in self.units.values() for slot in unit.slots)
