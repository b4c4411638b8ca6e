"""`streamppo check`: mistakes in a configuration, found before anything is started. No Ray, no GPU, no network.

ok         looked at, and as a run needs it
note       works, and could be better
not here   cannot be looked at on this machine; it may be where the run will be
error      no run can be made of it
"""

from collections.abc import Sequence

import transformers
from rich.text import Text

from streamppo.commands.checks import machine, memory, model, task
from streamppo.commands.checks.finding import Finding, Findings, State
from streamppo.commands.echo import console, echo, table
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.tasks import plugins

STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "not here": "cyan", "error": "bold red"}


def check(config: Config, name: str, gpu_gib: float | None) -> int:
    """Print the effective settings of the configuration `name`, then the findings, errors last.

    The exit code is 1 if there is an error.
    """
    plugins.export_path()
    transformers.utils.logging.set_verbosity_error()
    findings = list(_findings(config, memory.gpu(gpu_gib)))
    errors, absent = (sum(one.state == state for one in findings) for state in ("error", "not here"))
    echo(f"{configfile.show(config)}\n")
    _print_table(sorted(findings, key=lambda one: one.state == "error"))
    echo(f"\n{name}: {errors} errors, {absent} things that cannot be looked at here")
    return 1 if errors else 0


def _findings(config: Config, gpu: memory.Gpu) -> Findings:
    loaded, found = model.load(config)
    yield from found
    yield from model.critic(config.algorithm.critic)
    prompts, found = task.load(config, loaded.tokenizer)
    yield from found
    yield from task.rewards(config, prompts)
    yield from task.environment(config)
    yield machine.engine(config)
    yield from machine.places(config)
    if loaded.hf_config is not None:
        yield from memory.memory(config, loaded.hf_config, gpu)


def _print_table(findings: Sequence[Finding]) -> None:
    rows = table("", "", "")
    for column in rows.columns[:2]:
        column.no_wrap = True
    for one in findings:
        rows.add_row(one.subject, Text(one.state, STYLES[one.state]), one.text)
    console().print(rows)
