"""Reads the arguments of commands: runs, replays, models, configurations, and changes to a run's configuration."""

import logging
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from streamppo.config import consent, diff
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import inputs
from streamppo.errors import UNREADABLE, ConfigError, JournalError

log = logging.getLogger(__name__)


def configuration_of(model: Path, words: Sequence[str], version: int | None) -> tuple[Config | None, Config | None]:
    """Return two configurations: of the run `model` (None if it is not a run), and of a file in `words` (else None).

    Overrides in `words` apply to the file or, without a file, to the run. Raises `ConfigError` if `model` is not a run,
    and `words` have no file or a `version` is given.
    """
    files, overrides = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    if len(files) > 1:
        raise ConfigError(f"`streamppo eval` takes one CONFIG, not {' and '.join(files)}")
    is_run = (model / configfile.CONFIG).is_file()
    if not (is_run or files) or (version is not None and not is_run):
        lack = "a model needs a CONFIG, for its task and its reward" if version is None else f"so no version {version}"
        raise ConfigError(f"{model}: no run found, and {lack}")
    if is_run:
        configfile.existing(model)
    run_config = configfile.load(model / configfile.CONFIG, () if files else overrides) if is_run else None
    return run_config, configfile.load(Path(files[0]), overrides) if files else None


def runs_and_replays(command: str, paths: Sequence[Path]) -> list[Path]:
    """Return the absolute paths of runs and of files of replays. Raises `ConfigError` if `paths` is empty."""
    if not paths:
        raise ConfigError(f"`streamppo {command}` needs at least one run folder")
    return [path.resolve() if path.is_file() else configfile.existing(path) for path in paths]


def trusted_folder(run: Path, *, trust: bool) -> Path:
    """Require consent by `ask`, and return the absolute folder of a run. Raises the errors of `existing` and `ask`."""
    folder = configfile.existing(run)
    ask(folder, trust=trust)
    return folder


def ask(run: Path, present: Config | None = None, *, trust: bool = False) -> None:
    """Raise `ConfigError` if the user has not agreed to run the code in a present or earlier configuration of the run.

    `present` is the configuration to continue with, by default the run's; its paths replace recorded paths.
    """
    from streamppo.queue import resume_checks
    from streamppo.queue.store.journal import Journal

    run_config = configfile.load(run / configfile.CONFIG)
    configs = [run_config]
    # A run that never began has no journal. An unreadable journal is reported where its content is needed.
    with suppress(JournalError, *UNREADABLE), closing(Journal.open_run(run)) as journal:
        recorded = resume_checks.configs(journal).values()
        configs += [diff.as_present(config, present or run_config) for config in recorded]
    # Names that `present` adds come from the command line, and not from the folder.
    typed = consent.code(present or run_config) - consent.code(run_config)
    consent.require(run, configs, typed, trust=trust)


def agree_to_changes(run: Path, config: Config, *, trust: bool = False) -> list[str]:
    """Require and record consent to continue the run with `config`. Logs and returns the lines of `changes`."""
    lines = changes(run, config)
    inputs.refuse_missing(config, run)
    ask(run, config, trust=trust)
    consent.give(run, config)
    for line in lines:
        log.info(line)
    return lines


def changes(run: Path, config: Config) -> list[str]:
    """Return a line for each value of the run that `config` changes. Raises `ConfigError` if the value is fixed."""
    before = configfile.load(run / configfile.CONFIG)
    # If two runs have the same name, the second one's folder has a number, which `run --resume` includes in the name.
    if config.name not in (before.name, run.name):
        raise ConfigError(f"a run keeps its name, {before.name!r}: fork it under another name")
    # In a run that never began every value may change.
    if (run / "journal.sqlite").is_file() and (fault := diff.fixed_fault(before, config)):
        raise ConfigError(fault)
    return diff.describe_changes(before, config)
