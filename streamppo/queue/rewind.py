"""Writes the journal and archive of a run as they were at an earlier version: a fork of the run continues with them.

Let P be the newest prompt in all batches before the version. A slot of prompt P or of an older prompt is:

    in a batch before the version    consumed
    in a later batch                 open: it is sampled again, in the order of slots
    held by the run at present       open, in the same way
    in none of these                 abandoned or skipped

The fork opens the slots of newer prompts when it has room. No trajectory waits in the fork: if a trajectory waited in
the run at the version, its slot is sampled again, with the version's weights. With `max_lag = 0` none waited.

Example: 2 slots a batch, at version 2. Batches 0 and 1 have slots 0, 2 and 1, 5. Batch 2 has slots 3, 6. The journal
says that slot 4 was abandoned. Then slot 3 is open, slot 4 is abandoned, and slot 6 is not opened yet.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from streamppo import durable
from streamppo.config.sections import Config
from streamppo.errors import JournalError
from streamppo.queue import resume_checks
from streamppo.queue.rules.curriculum import RowCurriculum, resampled_prompts
from streamppo.queue.rules.records import (
    GIVEN_UP,
    Changes,
    Counters,
    Counts,
    EndedAttempt,
    GroupShape,
    KnownRows,
    PublishedVersion,
    SavedSlot,
)
from streamppo.queue.rules.state import QueueState, queue_settings
from streamppo.queue.shards import shards
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.store.journal import Journal
from streamppo.queue.store.trajectory_store import TrajectoryStore
from streamppo.types import Identity


class RewindPoint(NamedTuple):
    """A version to rewind to, the numbers of trajectories and tokens in all batches before it, and its admitted lag."""

    version: int
    trajectories: int
    tokens: int = 0
    admitted_lag: int | None = None


class Slots(NamedTuple):
    """The fork's slots: their number, the open slots, ended attempts at the other slots, and skipped prompts."""

    opened: int
    open: tuple[SavedSlot, ...]
    ended: tuple[EndedAttempt, ...]
    skipped: Counts


def rewind(run: Path, fork: Path, config: Config, point: RewindPoint) -> None:
    """Write the journal and archive of `run`, as of a version with the configuration `config`, to the folder `fork`.

    Files of the archive are hard links if the disk supports them, and are verified. Raises `JournalError`.
    """
    with closing(Journal.open_run(run)) as journal:
        versions, configs = journal.versions(), journal.configs()
        archive = Archive(run / "archive", checksums(versions.values()))
        slots = _slots(journal, versions, archive, config, point.version)
        rows = journal.known_rows()
        rows = None if rows is None or rows.since > point.version else rows
    for version in (version for version in archive.versions() if version < point.version):
        _link_batch(archive, version, fork / "archive")
    counters = _counters(config, slots, point)
    with closing(Journal(fork / "journal.sqlite")) as fork_journal:
        for version, encoded in configs.items():
            if version <= point.version:
                fork_journal.configure(version, encoded)
        past = [published for published in versions.values() if published.version <= point.version]
        counts = _zero_variance(archive, slots.ended, config, point.version, rows)
        fork_journal.write(
            Changes(
                counters, slots=slots.open, ended=slots.ended, zero_variance=counts, skipped=slots.skipped, rows=rows
            ),
            past,
        )
    for number in shards.numbers(config):
        TrajectoryStore(fork, number).close()


def link_or_copy(source: Path, target: Path, sha256: str = "") -> None:
    """Link `source` at `target`, or copy and flush it. Raises `OSError`, and `JournalError` if the SHA-256 differs."""
    digest = durable.sha256(source)
    if sha256 and digest != sha256:
        raise JournalError(f"{source}: damaged: its SHA-256 is not the one that was recorded")
    try:
        os.link(source.resolve(), target)
    except OSError:
        with durable.reading(source) as file, target.open("xb") as copy:
            shutil.copyfileobj(file, copy)
        durable.flush(target)


def _link_batch(archive: Archive, version: int, folder: Path) -> None:
    durable.folder(folder)
    files = archive.checksums[version]
    for path, sha256 in zip(archive.paths(version, len(files)), files, strict=True):
        try:
            link_or_copy(path, folder / path.name, sha256)
        except OSError as error:
            raise JournalError(f"{path}: cannot be read: {error}") from error


def _slots(
    journal: Journal, versions: Mapping[int, PublishedVersion], archive: Archive, config: Config, version: int
) -> Slots:
    shape = queue_settings(config).shape
    if not version:
        return Slots(0, (), (), ())
    counters = journal.counters()
    assert counters is not None, "a run with versions has counters"
    opened = _opened(versions, version, counters.opened, shape)
    identities = [
        trajectory.identity
        for published in versions.values()
        if published.version > version and published.archived is not None
        if published.archived.first_prompt * shape.samples_per_prompt < opened
        for trajectory in archive.batch(published.version - 1).trajectories
    ]
    identities += [slot.identity for slot in journal.slots()]
    numbered = ((_number(identity, shape), identity) for identity in identities)
    to_come = {number: identity for number, identity in numbered if number < opened}
    endings = journal.ended_attempts(range(opened))
    attempts = {number: 0 for number in to_come}
    if any(past.queue.segments for since, past in resume_checks.configs(journal).items() if since <= version):
        # Segments of earlier attempts may have been trained on, so their attempt numbers must not be used again.
        used = [(ending.number, ending.identity.attempt) for ending in endings]
        used += [(number, identity.attempt) for number, identity in to_come.items()]
        for number, attempt in used:
            attempts[number] = max(attempts.get(number, 0), attempt + 1)
    saved = tuple(
        SavedSlot(
            number=number,
            identity=structs.replace(identity, attempt=attempts[number], segment=0),
            actor=None,
            call=0,
            failures=0,
            trajectory=None,
        )
        for number, identity in sorted(to_come.items())
    )
    ended = tuple(ending for ending in endings if ending.number not in to_come)
    return Slots(opened, saved, ended, journal.skipped(range(opened)))


def _opened(versions: Mapping[int, PublishedVersion], version: int, most: int, shape: GroupShape) -> int:
    """The number of slots up to the newest prompt in batches before `version`; at most `most`, the run's slots."""
    later = [published for published in versions.values() if published.version > version]
    if dropped := [published.version for published in later if published.archived is None]:
        raise JournalError(
            f"the batch of version {dropped[0] - 1} was not kept, and it has prompts that waited at version {version}: "
            f"a fork can begin at version {dropped[-1]} or later"
        )
    newest = max(published.last_prompt for published in versions.values() if published.version <= version)
    return min(shape.slots_of(newest).stop, most)


def _number(identity: Identity, shape: GroupShape) -> int:
    return identity.prompt * shape.samples_per_prompt + identity.sample


def _counters(config: Config, slots: Slots, point: RewindPoint) -> Counters:
    open_numbers = {slot.number for slot in slots.open}
    shape = queue_settings(config).shape
    abandoned = {ended.number for ended in slots.ended if ended.state in GIVEN_UP}
    given_up = len(abandoned - open_numbers)
    given_up += len(slots.skipped) * shape.unit_size
    # All slots and segments that are not open have ended, but the journal may have forgotten the oldest endings.
    ended = slots.opened - len(open_numbers)
    consumed = point.trajectories
    cut = max(0, consumed + given_up - ended)
    return Counters(
        shape=shape,
        version=point.version,
        opened=slots.opened,
        abandoned=ended + cut - consumed,
        counts={"stored": consumed, "consumed": consumed, "cut": cut, "skipped_prompts": len(slots.skipped)},
        tokens={"delivered": point.tokens, "consumed": point.tokens},
        dropped={},
        failed={},
        fenced=(),
        admitted_lag=point.admitted_lag,
    )


def _zero_variance(
    archive: Archive, ended: Iterable[EndedAttempt], config: Config, version: int, rows: KnownRows | None
) -> Counts:
    settings = queue_settings(config)
    if settings.curriculum is None or rows is None:
        return ()
    state = QueueState(rows=rows)
    curriculum, before_each = RowCurriculum(settings.curriculum, settings, state), resampled_prompts(ended, settings)
    for before in (before for before in archive.versions() if rows.since <= before < version):
        state.resampled = before_each.get(before, {})
        curriculum.count_groups(archive.batch(before).trajectories)
    return tuple(state.zero_variance.items())
