"""Checks a run's folder before anything in it changes, so that a run that cannot be resumed is left unchanged."""

import os
from collections.abc import Iterator
from contextlib import closing
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

MAY_HAVE_LINKS = ("model", "wandb")
"""Folders of a run that may contain links: the model, which is only read, and wandb, which creates links."""
EDITORS = ".#"
"""The prefix of links that editors create as locks. No run writes a file with this prefix."""


def verify(config: Config, folder: Path, *, accept_changes: bool = False) -> None:
    """Refuse to resume the run in `folder` under `config` if the result would be wrong. A new run always passes.

    Changed data and models are refused unless `accept_changes`, and are then recorded as the run's inputs. Raises
    `JournalError`, `CheckpointError` or `RunError`.
    """
    for link in _links(folder):
        raise CheckpointError(f"{link}: a link, and a run would write through it: replace it by the file itself")
    resume_checks.refuse_without_journal(folder)
    if (folder / "journal.sqlite").is_file():
        _verify_journal(config, folder)
    remote.refuse_copy(config, folder)
    inputs.verify(config, folder, accept_changes=accept_changes)


def _verify_journal(config: Config, folder: Path) -> None:
    with closing(Journal.open_run(folder)) as journal:
        before, counters = resume_checks.newest_config(journal), journal.counters()
        if counters is not None:
            snapshot.refuse_other_shape(queue_settings(config), counters, journal.path)
    resume_checks.refuse_changed_settings(before, config)
    if before is not None:
        resume_checks.refuse_without_shards(folder, config)


def _links(run: Path) -> Iterator[Path]:
    """Yield links through which a run would write outside its folder: to files, or with a temporary name."""
    for place, folders, files in os.walk(run):
        if Path(place) == run:
            folders[:] = [name for name in folders if name not in MAY_HAVE_LINKS]
        for name in sorted([*files, *(name for name in folders if name.endswith(durable.ASIDE))]):
            if not name.startswith(EDITORS) and (path := Path(place, name)).is_symlink():
                yield path
