"""Checks that need neither torch nor transformers: `check` begins with them, `run` makes them before it starts."""

import logging

from streamppo import process
from streamppo.commands.checks import context, folder, libraries, machine, ranges, sampling, task
from streamppo.commands.checks.answers import answers
from streamppo.commands.checks.finding import Findings
from streamppo.commands.checks.notes import notes
from streamppo.commands.checks.task import LoadedTask
from streamppo.config.sections import LOCAL, Config
from streamppo.errors import ConfigError
from streamppo.tasks import plugins

LARGEST_MIB = 64
"""Larger data take too long to read before a run; `check` reads all."""

log = logging.getLogger(__name__)


def findings(config: Config, loaded: LoadedTask | None = None, *, largest_mib: int | None = None) -> Findings:
    """Make all quick checks, with the `loaded` task if there is one. Of data beyond `largest_mib` only the first rows
    are read.
    """
    plugins.export_path()
    yield from folder.model(config)
    yield from sampling.name_ignored(config)
    yield from folder.critic(config.algorithm.critic)
    yield from folder.teacher(config.algorithm.teacher)
    limit = None if largest_mib is None or task.mib(config) <= largest_mib else task.ROWS
    prompts, of_task, _ = loaded or task.load(config, None, limit=limit)
    # Repeated rows and omitted columns are logged by the run's actors, not here.
    yield from (
        finding for finding in of_task if largest_mib is None or (finding.subject, finding.state) != ("task", "note")
    )
    if prompts is not None:
        yield from answers(config, prompts, None)
        yield from context.findings(config, prompts)
    yield from task.rewards(config, prompts)
    yield from task.environment(config)
    yield from task.limit(config)
    yield machine.engine(config)
    yield from machine.places(config)
    yield from folder.copies(config)
    yield from libraries.trackers(config)
    yield from libraries.adapters(config)
    yield from libraries.transports(config)
    yield from ranges.notes(config)
    yield from notes(config, prompts if limit is None else None)


def refuse(config: Config) -> None:
    """Raise `ConfigError` with a line for each reason that a run of `config` cannot start here; log notes.

    On a cluster, another machine may have what is missing here.
    """
    fatal = ("error", "not here") if config.cluster.address == LOCAL else ("error",)
    wrong: list[str] = []
    with process.naming_prints():
        looked = list(findings(config, largest_mib=LARGEST_MIB))
    for finding in looked:
        if finding.state in fatal:
            wrong.append(f"{finding.subject}: {finding.text}")
        elif finding.state == "note":
            log.info(f"note: {finding.text}")
    if wrong:
        raise ConfigError("\n".join(wrong))
