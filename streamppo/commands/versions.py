"""A version of a run: its checkpoint, or the updates from an earlier one replayed from the archive."""

import logging
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from streamppo.commands import replay
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import DIVERGENCE_CAUSES, CheckpointError, Diverged, JournalError
from streamppo.learner.checkpoint import history as histories
from streamppo.learner.checkpoint import manifest, remote
from streamppo.learner.checkpoint.history import ANY, History
from streamppo.queue.store.archive import checksums
from streamppo.queue.store.journal import Journal

log = logging.getLogger(__name__)


class Past(NamedTuple):
    """A run up to a version: the digests of its versions, its batches, and its configurations."""

    run: Path
    version: int
    digests: dict[int, str]
    archived: set[int]
    history: History


def look(run: Path, at: int) -> Past:
    """Look at a run as of version `at`. Raises `JournalError` for a version that was never made."""
    present = configfile.load(run / configfile.CONFIG)
    with closing(Journal.open_run(run)) as journal:
        made = journal.versions()
    if at not in made:
        raise JournalError(f"{run}: version {at} was never made; the newest is {max(made, default=0)}")
    archived = set(checksums(made.values()))
    digests = {version: one.digest for version, one in made.items()}
    return Past(run, at, digests, archived, histories.read_history(run, present))


def newest_whole(past: Past) -> Path | None:
    """The newest checkpoint up to the version whose files all match the manifest; None if there is none.

    Files that this disk lacks or has damaged are fetched from the run's address, if it has one.
    """
    fetch = remote.fetcher(past.run)
    for path in reversed(manifest.complete(past.run / "checkpoints")):
        if int(path.name) <= past.version:
            try:
                manifest.verify_whole(path, past.history, fetch)
            except CheckpointError as error:
                log.info("%s: passed over", error)
            else:
                return path
    return None


def remake(past: Past, begin: Path | None, into: Path) -> None:
    """Replay the version, after the checkpoint `begin` (None: version 0), and save its checkpoint under `into`.

    Raises `JournalError` for a batch that was not kept, and `Diverged` if the version's weights differ from the
    recorded ones.
    """
    start = int(begin.name) if begin else 0
    missing = next((one for one in range(start, past.version) if one not in past.archived), None)
    if missing is not None:
        raise JournalError(
            f"{past.run}: version {past.version} cannot be replayed: the batch of version {missing} was not kept. "
            f"Choose the version of a checkpoint ({_checkpoints(past.run)}), or one after it whose batches are kept"
        )
    log.info("version %d is replayed from version %d: %d updates", past.version, start, past.version - start)
    configs = {version: _without_copies(config) for version, config in past.history.configs.items()}
    history = structs.replace(past.history, configs=configs)
    digests, _ = replay.remake(past.run, history, begin, past.version, checkpoints=into)
    if past.history.digests[past.version] not in (ANY, digests[past.version]):
        raise Diverged(
            f"version {past.version} was replayed and has other weights ({digests[past.version][:12]}, first "
            f"{past.digests[past.version][:12]}): {DIVERGENCE_CAUSES}"
        )
    past.digests[past.version] = digests[past.version]


def _without_copies(config: Config) -> Config:
    """A configuration of ranks that copy no checkpoint to the run's address."""
    cluster = structs.replace(config.cluster, own_disks=False)
    return structs.replace(config, cluster=cluster, checkpoint=structs.replace(config.checkpoint, remote=""))


def _checkpoints(run: Path) -> str:
    return ", ".join(str(int(path.name)) for path in manifest.complete(run / "checkpoints")) or "there is none"
