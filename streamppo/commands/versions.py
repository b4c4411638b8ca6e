"""Provides a version of a run: copies its checkpoint, or replays it from an earlier checkpoint."""

import logging
import shutil
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from streamppo import durable
from streamppo.commands import replay
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import DIVERGENCE_CAUSES, CheckpointError, Diverged, JournalError, RunError
from streamppo.learner.checkpoint import history as histories
from streamppo.learner.checkpoint import manifest, remote
from streamppo.learner.checkpoint.distcp import METADATA
from streamppo.learner.checkpoint.history import ANY, History
from streamppo.queue import rewind
from streamppo.queue.store.archive import checksums
from streamppo.queue.store.journal import Journal
from streamppo.terminal import counted

log = logging.getLogger(__name__)


class Past(NamedTuple):
    """A run's records for making `version`: all versions' `digests`, and the versions whose batches are `archived`."""

    run: Path
    version: int
    digests: dict[int, str]
    archived: set[int]
    history: History


def read_past(run: Path, at: int) -> Past:
    """Read a run's records for making version `at`. Raises `JournalError` if that version was never made."""
    present = configfile.load(run / configfile.CONFIG)
    with closing(Journal.open_run(run)) as journal:
        published = journal.versions()
    if at not in published:
        raise JournalError(f"{run}: version {at} was never made; the newest is {max(published, default=0)}")
    archived = set(checksums(published.values()))
    digests = {version: published[version].digest for version in published}
    return Past(run, at, digests, archived, histories.read_history(run, present))


def newest_whole(past: Past) -> Path | None:
    """Return the newest complete checkpoint up to `past.version`, or None. Damaged files are fetched if possible."""
    fetch = remote.fetcher(past.run)
    for path in reversed(manifest.complete(past.run / "checkpoints")):
        if int(path.name) <= past.version:
            try:
                manifest.verify_whole(path, past.history, fetch)
            except CheckpointError as error:
                log.info("%s: skipped", error)
            else:
                return path
    return None


def remake(past: Past, begin: Path | None, folder: Path) -> None:
    """Replay `past.version` from the checkpoint `begin` (None: version 0), and save its checkpoint in `folder`.

    Raises `JournalError` for a batch that was not kept, and `Diverged` if the weights differ from the recorded ones.
    """
    start = manifest.version_of(begin)
    missing = next((version for version in range(start, past.version) if version not in past.archived), None)
    if missing is not None:
        checkpoints = ", ".join(str(int(path.name)) for path in manifest.complete(past.run / "checkpoints"))
        raise JournalError(
            f"{past.run}: version {past.version} cannot be replayed: the batch of version {missing} was not kept. "
            f"Choose the version of a checkpoint ({checkpoints or 'there is none'}), or one after it whose batches are "
            "kept"
        )
    updates = counted(past.version - start, "update")
    log.info("version %d is replayed from version %d: %s", past.version, start, updates)
    configs = {version: _without_copies(config) for version, config in past.history.configs.items()}
    history = structs.replace(past.history, configs=configs)
    digests, _ = replay.remake(past.run, history, begin, past.version, checkpoints=folder)
    if past.history.digests[past.version] not in (ANY, digests[past.version]):
        raise Diverged(
            f"version {past.version} was replayed with other weights ({digests[past.version][:12]}, recorded "
            f"{past.digests[past.version][:12]}): {DIVERGENCE_CAUSES}"
        )
    past.digests[past.version] = digests[past.version]


def make_checkpoint(past: Past, folder: Path) -> int:
    """Copy or replay the checkpoint of `past.version` into `folder`; return the used checkpoint's version."""

    def use(begin: Path | None) -> int:
        start = manifest.version_of(begin)
        if begin and start == past.version:
            _copy_checkpoint(begin, folder / begin.name)
        else:
            remake(past, begin, folder)
        return start

    return replay.from_checkpoint(lambda: newest_whole(past), use)


def _copy_checkpoint(source: Path, target: Path) -> None:
    files = manifest.read(source).files
    hashes = {name: sha256 for part in (files.shared, *files.ranks) for name, sha256 in part.items()}
    with durable.naming(target, RunError):
        # An earlier attempt may have copied a part of a checkpoint before the run deleted it.
        shutil.rmtree(target, ignore_errors=True)
        durable.folder(target)
        for name, sha256 in hashes.items():
            rewind.link_or_copy(source / name, target / name, sha256)
        if METADATA not in hashes:
            rewind.link_or_copy(source / METADATA, target / METADATA)
        rewind.link_or_copy(source / manifest.MANIFEST, target / manifest.MANIFEST)


def _without_copies(config: Config) -> Config:
    cluster = structs.replace(config.cluster, own_disks=False)
    return structs.replace(config, cluster=cluster, checkpoint=structs.replace(config.checkpoint, remote=""))
