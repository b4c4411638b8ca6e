"""Checks that need neither torch nor transformers: `check` begins with them, `run` makes them before it starts."""

import logging

from streamppo import process
from streamppo.commands.checks import context, folder, libraries, machine, ranges, sampling, task
from streamppo.commands.checks.answers import answers
from streamppo.commands.checks.finding import Finding
from streamppo.commands.checks.notes import notes
from streamppo.commands.checks.task import LoadedTask
from streamppo.config.sections import LOCAL, Config
from streamppo.errors import ConfigError
from streamppo.tasks import plugins

LARGEST_MIB = 64
"""Larger data take too long to read before a run; `check` reads all."""

log = logging.getLogger(__name__)


def look(config: Config, *, largest_mib: int | None = None) -> tuple[list[Finding], LoadedTask]:
    """Make all quick checks; return the findings and the task.

    Of data beyond `largest_mib` only the first rows are read.
    """
    plugins.export_path()
    limit = None if largest_mib is None or task.mib(config) <= largest_mib else task.ROWS
    loaded = task.load(config, None, limit=limit)
    found = [
        *folder.model(config),
        *sampling.name_ignored(config),
        *folder.critic(config.algorithm.critic),
        *folder.teacher(config.algorithm.teacher),
    ]
    # Repeated rows and omitted columns are logged by the run's actors, not here.
    found += [one for one in loaded.findings if largest_mib is None or (one.subject, one.state) != ("task", "note")]
    if loaded.task is not None:
        found += answers(config, loaded.task, None)
        found += context.findings(config, loaded.task)
    found += task.rewards(config, loaded.task)
    found += task.environment(config)
    found += task.limit(config)
    found.append(machine.engine(config))
    found += machine.places(config)
    found += folder.copies(config)
    found += libraries.trackers(config)
    found += libraries.adapters(config)
    found += libraries.transports(config)
    found += ranges.notes(config)
    found += notes(config, loaded.task if limit is None else None)
    return found, loaded


def refuse(config: Config) -> None:
    """Raise `ConfigError` with a line for each reason that a run of `config` cannot start here; log notes.

    On a cluster, another machine may have what is missing here.
    """
    fatal = ("error", "not here") if config.cluster.address == LOCAL else ("error",)
    wrong: list[str] = []
    with process.naming_prints():
        looked, _ = look(config, largest_mib=LARGEST_MIB)
    for finding in looked:
        if finding.state in fatal:
            wrong.append(f"{finding.subject}: {finding.text}")
        elif finding.state == "note":
            log.info(f"note: {finding.text}")
    if wrong:
        raise ConfigError("\n".join(wrong))
