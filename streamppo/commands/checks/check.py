"""`streamppo check`: finds mistakes in a configuration without starting Ray, and without a GPU or network.

ok         right for a run
note       works, but is probably not intended
later      cannot be known before a run starts
not here   missing on this machine, so that no run can start here; another machine may have it
error      no run can start anywhere

Light checks rarely import torch or transformers. Light checks come first, and `run` makes only light checks. Memory,
the tokenizer and scores of rows are checked if the light checks find no error.
"""

import logging
from collections.abc import Sequence

from streamppo import process
from streamppo.commands.checks import folder, lengths, machine, notes, task
from streamppo.commands.checks.finding import Finding, State, print_findings
from streamppo.commands.checks.task import LoadedTask
from streamppo.commands.console import echo
from streamppo.config.sections import LOCAL, Config
from streamppo.errors import ConfigError
from streamppo.tasks import plugins
from streamppo.terminal import counted

LARGEST_MIB = 64
"""`run` reads only the first rows of larger data. `check` reads all rows."""

log = logging.getLogger(__name__)


def check(config: Config, name: str, gpu_gib: float | None, *, call: bool) -> int:
    """Print findings, errors last; with `call`, score a few rows. Returns 1 if there is an error."""
    findings = check_all(config, gpu_gib, call=call)
    errors, absent = _count(findings, "error"), _count(findings, "later") + _count(findings, "not here")
    print_findings(sorted(findings, key=lambda finding: finding.state == "error"))
    echo("", f"{name}: {counted(errors, 'error')}, {counted(absent, 'subject')} that cannot be checked here")
    return 1 if errors else 0


def check_all(config: Config, gpu_gib: float | None, *, call: bool = False) -> list[Finding]:
    """Make the light checks and, if they find no error, the checks that need torch; with `call`, score a few rows."""
    with process.naming_prints():
        findings, loaded = check_lightly(config)
        if _count(findings, "error"):
            text = "tokenizer, lengths of prompts and memory are checked once the errors are fixed"
            return [*findings, Finding("model", "later", text)]
        return _check_with_torch(findings, config, loaded, gpu_gib, call=call)


def check_lightly(config: Config, *, largest_mib: int | None = None) -> tuple[list[Finding], LoadedTask]:
    """Make the light checks; of data above `largest_mib`, only the first rows are read."""
    plugins.export_path()
    limit = None if largest_mib is None or task.mib(config) <= largest_mib else task.ROWS
    loaded = task.load(config, None, limit=limit)
    findings = [
        *folder.model(config),
        *folder.ignored_sampling(config),
        *folder.critic(config.algorithm.critic),
        *folder.teacher(config.algorithm.teacher),
    ]
    # `run` omits the task's notes (repeated rows, omitted columns), because the actors log them.
    omitted = None if largest_mib is None else ("task", "note")
    findings += [finding for finding in loaded.findings if (finding.subject, finding.state) != omitted]
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


def _check_with_torch(
    findings: Sequence[Finding], config: Config, untokenized: LoadedTask, gpu_gib: float | None, *, call: bool
) -> list[Finding]:
    import transformers

    from streamppo.commands.checks import memory, model, rows, turns
    from streamppo.learner.parallel import context_parallel, tensor_parallel

    transformers.utils.logging.set_verbosity_error()
    (hf_config, tokenizer), model_findings = model.load(config, untokenized.lesson)
    findings = [*findings, *model_findings]
    if not any(finding.state == "error" for finding in model_findings):
        findings += model.files(config)
    characters = None if untokenized.lesson is None else rows.characters(untokenized.lesson)
    built = untokenized.task
    if tokenizer is not None:
        built, task_findings, _ = task.load(config, tokenizer)
        findings = [finding for finding in findings if finding.subject not in ("task", "context")] + task_findings
        if built is not None:
            findings += lengths.answers(config, built, tokenizer)
            findings += turns.findings(config, built, tokenizer, call=call)
    elif built is not None and config.environment is not None and characters is not None:
        findings += turns.findings(config, built, characters, call=call)
    if built is not None:
        findings += rows.score(config, built, tokenizer or characters, call=call)
    if hf_config is None:
        return [*findings, Finding("memory", "later", "it is estimated once the model can be read")]
    if tokenizer is not None:
        findings += model.ends(config, hf_config, tokenizer)
        if built is not None:
            findings += lengths.prompts(built, hf_config, tokenizer)
    findings += model.longest_rows(config, hf_config)
    mesh = config.learner.mesh
    refusals = context_parallel.refusal(hf_config, mesh.slices), tensor_parallel.refusal(hf_config, mesh.expert)
    findings += [Finding("mesh", "error", refusal) for refusal in refusals if refusal]
    findings += memory.memory(config, hf_config, memory.gpu(gpu_gib))
    return findings


def refuse(config: Config) -> None:
    """Log the notes, and raise `ConfigError` with a line for each reason why a run of `config` cannot start here.

    On a cluster, missing resources of this machine are not a reason, because another machine may have them.
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
