"""Checks before a run is resumed: the settings that it must keep, and the files that must exist."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from streamppo.config.diff import fixed_fault
from streamppo.config.sections import Config
from streamppo.errors import UNREADABLE, CheckpointError, JournalError
from streamppo.queue.shards import shards
from streamppo.queue.store import trajectory_store
from streamppo.queue.store.journal import Journal
from streamppo.types import decode


def configs(journal: Journal) -> dict[int, Config]:
    """The run's configurations by their first version. Raises `JournalError` for one that another streamppo wrote."""
    try:
        return {version: decode(encoded, Config) for version, encoded in journal.configs().items()}
    except UNREADABLE as error:
        raise JournalError(
            f"{journal.path}: has a configuration of another version of streamppo: {error}. The version that began the "
            "run can continue with it"
        ) from error


def newest_config(journal: Journal) -> Config | None:
    """The run's last configuration; None if the run never began. Raises `JournalError` as `configs` does."""
    return next(reversed(configs(journal).values()), None)


def is_exact(recorded: Mapping[int, Config], version: int) -> bool:
    """True if repeating `version` gives the same weights: all configurations up to `version` have `learner.exact`."""
    return all(config.learner.exact for since, config in recorded.items() if since < max(version, 1))


def refuse_changed_settings(before: Config | None, config: Config) -> None:
    """Raise `CheckpointError` if `config` changes a fixed setting of the run; `before` is its last configuration."""
    if before is not None and (fault := fixed_fault(before, config)):
        raise CheckpointError(fault)


def refuse_without_journal(run: Path) -> None:
    """Raise `JournalError` if the run in the folder `run` has trained and its journal is missing."""
    path = run / "journal.sqlite"
    trained = next((run / "archive").glob("*.zarr.zip"), None) or next((run / "checkpoints").glob("[0-9]*"), None)
    if trained is not None and not path.is_file():
        quoted = shlex.quote(str(run))
        raise JournalError(
            f"{path}: missing, though {trained} exists: only it records what was trained on. "
            f"Put it back, with journal.tip, to continue; `streamppo export {quoted} --to FOLDER` gets the weights out"
        )


def refuse_without_shards(run: Path, config: Config) -> None:
    """Raise `JournalError` if the folder `run` lacks the journal of a shard. The run must have begun."""
    for number in shards.numbers(config):
        if not (path := trajectory_store.path(run, number)).is_file():
            raise JournalError(f"{path}: missing: it has the tokens of waiting trajectories. Put it back to continue")
