"""The rows of the journal, and the changes of one transaction.

The versions of a run form a chain. Each row has a link, a digest of its content and of the previous link:

    link(v) = SHA-256(v, digest of the weights, digest of the batch, SHA-256 of the configuration, link(v - 1))

The configuration is the one with which version v was trained. A change of a row, or of the weights, batch or
configuration in it, changes every later link. The chain has no key, so the owner of a folder can recompute all links.
Only a copy of the last link reveals that they were recomputed.
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
"""The endings of an attempt that also abandon the slot."""

NO_ROWS = RowNumbers(sources=(), seed=0)
"""The rows of a queue without a curriculum."""


class KnownRows(WireStruct, frozen=True):
    """How prompts map to data rows, and the version from which groups of these rows count."""

    numbers: RowNumbers
    since: int


Counts: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a data row and its z (curriculum.py), or of the first slot of a skipped prompt and the z of its row."""


class SavedSlot(WireStruct, frozen=True):
    """A held slot or part: open, issued to `actor` for its request `call`, or ready (with shards: a `record`)."""

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
        return self.record or self.trajectory

    @property
    def state(self) -> SlotState:
        """Open, issued or ready; whether a ready slot is leased is recorded in a `Lease`."""
        return READY if self.stored else ISSUED if self.actor else OPEN


class GroupShape(NamedTuple):
    """The task's kind and the sizes of its groups and units; together they determine the number of every slot."""

    task: str
    samples_per_prompt: int
    unit_size: int

    def slots_of(self, prompt: int) -> range:
        first = prompt * self.samples_per_prompt
        return range(first, first + self.samples_per_prompt)


class Counters(WireStruct, frozen=True):
    """The state of a queue, except slots and leases. A journal that has another `shape` belongs to another run."""

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
    """The leased batch of `version`: its slots (number, part) in order, and the oldest version that it may train on."""

    version: int
    min_version: int
    slots: tuple[tuple[int, int], ...]


class EndedAttempt(WireStruct, frozen=True, omit_defaults=True):
    """An attempt that was not trained on, and the reason; attempts that were trained on are in the archive.

    It ended at the queue's `version`, by a failure in `stage` or for another reason (""). `tokens` counts its sampled
    tokens (0: unknown), `oldest` is their oldest version (-1: unknown). `reward` is None if no trajectory was stored.
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
    """Record the end of the attempt at `slot`, before the slot is reopened or abandoned."""
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
    """The journal's record of a batch: the SHA-256 of its file or of each shard's file, and its range of prompts."""

    files: tuple[str, ...]
    first_prompt: int
    last_prompt: int

    @property
    def digest(self) -> str:
        """The SHA-256 of the batch's file; for several files, the SHA-256 of the list of their SHA-256."""
        return self.files[0] if len(self.files) == 1 else sha256(",".join(self.files).encode()).hexdigest()


class PublishedVersion(WireStruct, frozen=True, omit_defaults=True):
    """A published version, with the digest of its weights, and the `link` that the journal adds.

    `archived` is the batch that made the version. It is None for version 0, and if the batch is no longer kept: then
    `forgotten` is the batch's digest, and `newest_prompt` is its largest prompt number.
    """

    version: int
    digest: str
    archived: ArchivedBatch | None
    link: str = ""
    forgotten: str = ""
    newest_prompt: int = -1

    @property
    def last_prompt(self) -> int:
        """The largest prompt number in the batch that made the version; -1 for version 0."""
        return self.archived.last_prompt if self.archived else self.newest_prompt

    @property
    def batch_digest(self) -> str:
        """The digest of the batch that made the version; "" for version 0."""
        return self.archived.digest if self.archived else self.forgotten


def with_link(published: PublishedVersion, configs: Mapping[int, bytes], before: str) -> PublishedVersion:
    """Add the link to a version's record. `configs` come from the journal, `before` is the previous version's link."""
    since = max((first for first in configs if first < published.version), default=None)
    config = "" if since is None else sha256(configs[since]).hexdigest()
    content = json.dumps([published.version, published.digest, published.batch_digest, config, before])
    return structs.replace(published, link=sha256(content.encode()).hexdigest())


def chain_breaks(versions: Mapping[int, PublishedVersion], configs: Mapping[int, bytes]) -> list[int]:
    """The first missing version of every gap, and all versions whose link does not fit their content."""
    missing = {0, *(version + 1 for version in versions)} - {max(versions, default=-1) + 1} - versions.keys()
    links = {version: published.link for version, published in versions.items()}
    broken = {
        version
        for version, published in versions.items()
        if with_link(published, configs, links.get(version - 1, "")).link != published.link
    }
    return sorted(missing | broken)


class Changes(NamedTuple):
    """The changes that one transaction writes; a whole queue is the changes since an empty one.

    `PendingChanges` explains `zero_variance`, `skipped` and `rows`.
    """

    counters: Counters
    slots: tuple[SavedSlot, ...] = ()
    leases: tuple[Lease, ...] = ()
    removed: tuple[tuple[int, int], ...] = ()
    dead: tuple[DeadLetter, ...] = ()
    ended: tuple[EndedAttempt, ...] = ()
    zero_variance: Counts = ()
    skipped: Counts = ()
    rows: KnownRows | None = None
