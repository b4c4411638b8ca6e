"""Checks a run's folder before anything in it changes: a run that cannot be resumed stays byte for byte as it was."""

from pathlib import Path

from streamppo.config.sections import Config
from streamppo.driver import inputs
from streamppo.learner.checkpoint import remote
from streamppo.queue import resume_checks
from streamppo.queue.rules.state import settings_of
from streamppo.queue.store import snapshot
from streamppo.queue.store.journal import Journal


def verify(config: Config, folder: Path, *, accept_changes: bool = False) -> None:
    """Refuse to resume the run in `folder` under `config` where the result would be wrong; a new run always passes.

    Changed data and models are refused too, unless `accept_changes`; then they are recorded as the run's inputs. Raises
    `JournalError`, `CheckpointError` or `RunError`.
    """
    resume_checks.refuse_without_journal(folder)
    if (folder / "journal.sqlite").is_file():
        _verify_journal(config, folder)
    remote.refuse_copy(config, folder)
    inputs.verify(config, folder, accept_changes=accept_changes)


def _verify_journal(config: Config, folder: Path) -> None:
    journal = Journal.open_run(folder)
    try:
        before, counters = resume_checks.newest_config(journal), journal.counters()
        if counters is not None:
            snapshot.refuse_other_shape(settings_of(config), counters, journal.path)
    finally:
        journal.close()
    resume_checks.refuse_other(before, config)
    if before is not None:
        resume_checks.refuse_without_shards(folder, config)
