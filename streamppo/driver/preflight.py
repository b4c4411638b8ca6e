"""Looks at a run's folder before anything in it is changed: a run that cannot go on is left byte for byte as it was."""

import logging
from pathlib import Path

from streamppo.config.sections import Config
from streamppo.driver import inputs
from streamppo.errors import CheckpointError
from streamppo.learner import manifest, remote
from streamppo.queue import continuation, snapshot
from streamppo.queue.journal import Journal
from streamppo.queue.state import settings_of
from streamppo.telemetry import metrics_file

log = logging.getLogger(__name__)


def verify(config: Config, folder: Path, *, accept_changes: bool = False) -> None:
    """Refuse to go on with the run in `folder` as `config` says, if that cannot be right; a new run always may.

    Changed data and models are refused too, unless `accept_changes`; they are remembered from here on. Raises
    `JournalError`, `CheckpointError` or `RunError`.
    """
    continuation.refuse_without_journal(folder)
    if (folder / "journal.sqlite").is_file():
        _verify_journal(config, folder)
    inputs.verify(config, folder, accept_changes=accept_changes)


def _verify_journal(config: Config, folder: Path) -> None:
    journal = Journal.of(folder)
    try:
        before, counters, versions = continuation.newest_config(journal), journal.counters(), journal.versions()
        if counters is not None:
            snapshot.refuse_other_shape(settings_of(config), counters, journal.path)
    finally:
        journal.close()
    continuation.refuse_other(before, config, max(versions, default=0), lambda: _start(folder))
    if before is not None:
        continuation.refuse_without_shards(folder, config)


def _start(folder: Path) -> int:
    """The version from which the learner would begin. Damaged checkpoints stay where they are."""
    recorded = max(metrics_file.recorded(metrics_file.read(folder)), default=0)
    copies = remote.Remote(address).versions() if (address := remote.known(folder)) else []
    newest = max([version for version in copies if version <= recorded], default=0)
    for path in reversed(manifest.complete(folder / "checkpoints")):
        if newest < int(path.name) <= recorded and _is_whole(path):
            return int(path.name)
    return newest


def _is_whole(path: Path) -> bool:
    """Tell if no file of a checkpoint is damaged, of those that are on this disk."""
    try:
        for rank in range(manifest.read(path).state.ranks):
            manifest.verify(path, rank)
    except manifest.Damaged as error:
        log.info("%s", error)
        return False
    except CheckpointError:
        # It is on the disk of its rank, which verifies it.
        pass
    return True
