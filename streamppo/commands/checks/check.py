"""`streamppo check`: mistakes in a configuration, found before anything starts. No Ray, no GPU, no network.

ok         checked, and as a run needs it
note       works, and is probably not intended
later      known when a run starts
not here   missing on this machine, so no run can start here; it may be elsewhere
error      no run is possible

Light checks, without torch and transformers, come first; `run` makes only these. Memory, the tokenizer and scores of
rows are checked if the light checks find no error.
"""

import logging
from collections.abc import Sequence

from streamppo import process
from streamppo.commands.checks import folder, lengths, machine, notes, task
from streamppo.commands.checks.finding import Finding, State, print_findings
from streamppo.commands.checks.task import LoadedTask
from streamppo.commands.console import echo
from streamppo.config import file as configfile
from streamppo.config.sections import LOCAL, Config
from streamppo.errors import ConfigError
from streamppo.tasks import plugins

LARGEST_MIB = 64
"""`run` reads only the first rows of larger data; `check` reads all."""

log = logging.getLogger(__name__)


def check(config: Config, name: str, gpu_gib: float | None, *, call: bool) -> int:
    """Print the effective settings of the configuration `name`, then the findings, errors last.

    Rewards are called on a few rows if `call` is true. The exit code is 1 if there is an error.
    """
    findings = check_all(config, gpu_gib, call=call)
    errors, absent = _count(findings, "error"), _count(findings, "later") + _count(findings, "not here")
    echo(*configfile.show(config).split("\n"), "")
    print_findings(sorted(findings, key=lambda finding: finding.state == "error"))
    echo("", f"{name}: {errors} errors, {absent} subjects that cannot be checked here")
    return 1 if errors else 0


def check_all(config: Config, gpu_gib: float | None, *, call: bool = False) -> list[Finding]:
    """Make all checks of `config`; those with torch only if the light checks find no error.

    Rewards are called on a few rows if `call` is true.
    """
    with process.naming_prints():
        findings, loaded = check_lightly(config)
        if _count(findings, "error"):
            text = "tokenizer, lengths of prompts and memory are checked once the errors are fixed"
            return [*findings, Finding("model", "later", text)]
        # Torch takes seconds to import, and other errors come first.
        from streamppo.commands.checks import torch_checks

        return torch_checks.add(findings, config, loaded, gpu_gib, call=call)


def check_lightly(config: Config, *, largest_mib: int | None = None) -> tuple[list[Finding], LoadedTask]:
    """Make the light checks; return the findings and the task.

    Of data beyond `largest_mib` only the first rows are read.
    """
    plugins.export_path()
    limit = None if largest_mib is None or task.mib(config) <= largest_mib else task.ROWS
    loaded = task.load(config, None, limit=limit)
    findings = [
        *folder.model(config),
        *folder.ignored_sampling(config),
        *folder.critic(config.algorithm.critic),
        *folder.teacher(config.algorithm.teacher),
    ]
    # `run` leaves notes about repeated rows and omitted columns to the log of its actors.
    findings += [
        finding
        for finding in loaded.findings
        if largest_mib is None or (finding.subject, finding.state) != ("task", "note")
    ]
    if loaded.task is not None:
        findings += lengths.answers(config, loaded.task, None)
        findings += lengths.prompt_bytes(config, loaded.task)
    findings += task.rewards(config, loaded.task)
    findings += task.environment(config)
    findings += task.limit(config)
    findings.append(machine.engine(config))
    findings += machine.places(config)
    findings += machine.copies(config)
    findings += machine.libraries(config)
    findings += notes.ranges(config)
    findings += notes.settings(config, loaded.task if limit is None else None)
    return findings, loaded


def refuse(config: Config) -> None:
    """Raise `ConfigError` with a line for each reason that a run of `config` cannot start here; log notes.

    On a cluster, another machine may have what is missing here.
    """
    fatal = ("error", "not here") if config.cluster.address == LOCAL else ("error",)
    reasons: list[str] = []
    with process.naming_prints():
        findings, _ = check_lightly(config, largest_mib=LARGEST_MIB)
    for finding in findings:
        if finding.state in fatal:
            reasons.append(f"{finding.subject}: {finding.text}")
        elif finding.state == "note":
            log.info(f"note: {finding.text}")
    if reasons:
        raise ConfigError("\n".join(reasons))


def _count(findings: Sequence[Finding], state: State) -> int:
    return sum(finding.state == state for finding in findings)
