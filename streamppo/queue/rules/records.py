"""The rows of the journal, and the changes of one transaction.

The versions of a run form a chain: each row has a link, a digest of its content and of the previous link.

    link(v) = SHA-256(v, digest of the weights, digest of the batch, SHA-256 of the configuration, link(v - 1))

The configuration is that of the update. A change of a row, or of anything it names, changes every later link, and so
the last one. The chain has no key: the owner of a folder can recompute it, which only a copy of the last link reveals.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Literal, NamedTuple, TypeAlias

from msgspec import structs

from streamppo.queue.rules.ahead import FIRST
from streamppo.queue.rules.slot import ISSUED, OPEN, READY, Slot, SlotState, TrajectoryRecord
from streamppo.tasks.order import RowNumbers
from streamppo.types import Identity, Trajectory, WireStruct

Ending: TypeAlias = Literal["too_old", "failed", "dead_letter", "lost", "abandoned", "resampled"]
GIVEN_UP: tuple[Ending, ...] = ("abandoned", "resampled")
"""The endings after which the slot is abandoned."""


NO_ROWS = RowNumbers(sources=(), seed=0)
"""Stands for the rows of a queue without a curriculum."""


class KnownRows(WireStruct, frozen=True):
    """How prompts map to rows, and the version from which groups of these rows count."""

    numbers: RowNumbers
    since: int


Counts: TypeAlias = tuple[tuple[int, int], ...]
"""Of `algorithm.curriculum`: pairs (row or first slot, groups without a learning signal in a row)."""


class SavedSlot(WireStruct, frozen=True):
    """A held slot, or a part of one: open, issued to `actor` by its request `call`, or ready.

    If the queue has shards, a ready slot has a `record` instead of the `trajectory`.
    """

    number: int
    identity: Identity
    actor: str | None
    call: int
    failures: int
    trajectory: Trajectory | None
    part: int = 0
    record: TrajectoryRecord | None = None

    @property
    def stored(self) -> Trajectory | None:
        """The trajectory or its record; None before it is delivered."""
        return self.record or self.trajectory

    @property
    def state(self) -> SlotState:
        """Open, issued or ready; a ready slot is leased if a `Lease` names it."""
        return READY if self.stored else ISSUED if self.actor else OPEN


class GroupShape(NamedTuple):
    """The task's kind and the sizes of its groups and units; these determine the number of every slot."""

    task: str
    samples_per_prompt: int
    unit_size: int

    def slots_of(self, prompt: int) -> range:
        """The numbers of a prompt's slots."""
        first = prompt * self.samples_per_prompt
        return range(first, first + self.samples_per_prompt)


class Counters(WireStruct, frozen=True):
    """The state of a queue without its slots and leases. A journal with another `shape` belongs to another run."""

    shape: GroupShape
    version: int
    opened: int
    abandoned: int
    counts: dict[str, int]
    tokens: dict[str, int]
    dropped: dict[str, int]
    failed: dict[str, int]
    fenced: tuple[str, ...]
    admitted_lag: int | None = None
    needed_lag: int = FIRST


class Lease(WireStruct, frozen=True):
    """The batch of `version`: its slots as (number, part), in order."""

    version: int
    min_version: int
    slots: tuple[tuple[int, int], ...]


class EndedAttempt(WireStruct, frozen=True, omit_defaults=True):
    """An attempt that ended without being trained on, and the reason; the archive has the attempts trained on.

    `version` is the queue's at the end. `stage` is the failed stage, "" unless the attempt itself failed. `tokens` were
    sampled, by versions from `oldest` on; 0 and -1 if unknown. `reward` is that of a stored trajectory.
    """

    number: int
    identity: Identity
    state: Ending
    reason: str
    version: int = 0
    stage: str = ""
    tokens: int = 0
    oldest: int = -1
    source: str = ""
    reward: float | None = None


def ended_attempt(slot: Slot, state: Ending, reason: str, version: int) -> EndedAttempt:
    """The record of the attempt at `slot`, before the slot is reopened or abandoned."""
    (stage, tokens, oldest, source), reward = slot.failed or ("", 0, -1, ""), None
    if (trajectory := slot.trajectory) is not None:
        tokens, oldest, source = trajectory.num_sampled, trajectory.oldest_version, trajectory.source
        reward = trajectory.reward
    return EndedAttempt(
        number=slot.number,
        identity=slot.identity,
        state=state,
        reason=reason,
        version=version,
        stage=stage,
        tokens=tokens,
        oldest=oldest,
        source=source,
        reward=reward,
    )


class DeadLetter(WireStruct, frozen=True):
    """A delivered trajectory that cannot be trained on, and the reason."""

    trajectory: Trajectory
    reason: str


class ArchivedBatch(WireStruct, frozen=True):
    """The archive's record of one batch: the SHA-256 of its only file, or of the file of each shard.

    `first_prompt` and `last_prompt` are the smallest and the largest prompt number of the batch.
    """

    files: tuple[str, ...]
    first_prompt: int
    last_prompt: int

    @property
    def digest(self) -> str:
        """The SHA-256 of the only file, or of those of all files."""
        return self.files[0] if len(self.files) == 1 else sha256(",".join(self.files).encode()).hexdigest()


class PublishedVersion(WireStruct, frozen=True, omit_defaults=True):
    """A published version: its weights' digest, and the archived batch that made it; version 0 has none.

    The journal adds the `link`. `forgotten` is the digest of a batch that is no longer kept, and `newest_prompt` its
    largest prompt number.
    """

    version: int
    digest: str
    archived: ArchivedBatch | None
    link: str = ""
    forgotten: str = ""
    newest_prompt: int = -1

    @property
    def last_prompt(self) -> int:
        """The largest prompt number of the batch that made it; -1 for version 0."""
        return self.archived.last_prompt if self.archived else self.newest_prompt

    @property
    def batch_digest(self) -> str:
        """The digest of the batch that made it; empty for version 0."""
        return self.archived.digest if self.archived else self.forgotten


def with_link(made: PublishedVersion, configs: Mapping[int, bytes], before: str) -> PublishedVersion:
    """The record with its link; `before` is the previous version's link, `configs` are the journal's."""
    since = max((first for first in configs if first < made.version), default=None)
    config = "" if since is None else sha256(configs[since]).hexdigest()
    content = json.dumps([made.version, made.digest, made.batch_digest, config, before])
    return structs.replace(made, link=sha256(content.encode()).hexdigest())


def chain_breaks(versions: Mapping[int, PublishedVersion], configs: Mapping[int, bytes]) -> list[int]:
    """The first missing version of every gap, and the versions whose link differs from that of their content."""
    missing = {0, *(version + 1 for version in versions)} - {max(versions, default=-1) + 1} - versions.keys()
    links = {version: made.link for version, made in versions.items()}
    broken = {
        version
        for version, made in versions.items()
        if with_link(made, configs, links.get(version - 1, "")).link != made.link
    }
    return sorted(missing | broken)


class Changes(NamedTuple):
    """The changes of one transaction, in the order of writing; those of the curriculum are as in `PendingChanges`."""

    counters: Counters
    slots: tuple[SavedSlot, ...] = ()
    leases: tuple[Lease, ...] = ()
    gone: tuple[tuple[int, int], ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    ended: tuple[EndedAttempt, ...] = ()
    zero_variance: Counts = ()
    skipped: Counts = ()
    rows: KnownRows | None = None


class QueueSnapshot(NamedTuple):
    """Everything needed to rebuild a queue."""

    counters: Counters
    slots: tuple[SavedSlot, ...]
    leases: tuple[Lease, ...]
    zero_variance: Counts = ()
    rows: KnownRows | None = None
