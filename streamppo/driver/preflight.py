"""Checks a run's folder before anything in it changes: a run that cannot be resumed stays byte for byte as it was."""

import os
from collections.abc import Iterator
from pathlib import Path

from streamppo import durable
from streamppo.config.sections import Config
from streamppo.driver import inputs
from streamppo.errors import CheckpointError
from streamppo.learner.checkpoint import remote
from streamppo.queue import resume_checks
from streamppo.queue.rules.state import queue_settings
from streamppo.queue.store import snapshot
from streamppo.queue.store.journal import Journal

OTHERS = ("model", "wandb")
"""Folders of a run that may have links: of the model, whose files are only read, and of wandb, which makes links."""

EDITORS = ".#"
"""Prefix of an editor's lock, a link whose name no run writes."""


def verify(config: Config, folder: Path, *, accept_changes: bool = False) -> None:
    """Refuse to resume the run in `folder` under `config` if the result would be wrong; a new run always passes.

    Changed data and models are refused too, unless `accept_changes`; then they are recorded as the run's inputs. Raises
    `JournalError`, `CheckpointError` or `RunError`.
    """
    for link in _links(folder):
        raise CheckpointError(f"{link}: a link, and a run would write through it: put the file itself in its place")
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
            snapshot.refuse_other_shape(queue_settings(config), counters, journal.path)
    finally:
        journal.close()
    resume_checks.refuse_changed_settings(before, config)
    if before is not None:
        resume_checks.refuse_without_shards(folder, config)


def _links(run: Path) -> Iterator[Path]:
    """Links by which a run would change files outside its folder: to files, and at the temporary names of folders.

    Other links to folders, such as checkpoints on another disk, are the user's.
    """
    for place, folders, files in os.walk(run):
        if Path(place) == run:
            folders[:] = [name for name in folders if name not in OTHERS]
        for name in sorted([*files, *(name for name in folders if name.endswith(durable.ASIDE))]):
            if not name.startswith(EDITORS) and (path := Path(place, name)).is_symlink():
                yield path
