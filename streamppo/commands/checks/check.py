"""`streamppo check`: mistakes in a configuration, found before anything is started. No Ray, no GPU, no network.

ok         checked, and as a run needs it
note       works, and is probably not intended
later      known when a run starts
not here   missing on this machine, so no run can start here; it may be elsewhere
error      no run is possible

Checks without torch come first. Memory, the tokenizer and scores of rows are checked if they find no error.
"""

from collections.abc import Sequence

from rich.text import Text

from streamppo import process
from streamppo.commands.checks import light_checks
from streamppo.commands.checks.finding import Finding, State
from streamppo.commands.console import console, echo, table
from streamppo.config import file as configfile
from streamppo.config.sections import Config

STYLES: dict[State, str] = {
    "ok": "green",
    "note": "yellow",
    "later": "cyan",
    "not here": "cyan",
    "error": "bold red",
}


def check(config: Config, name: str, gpu_gib: float | None, *, call: bool) -> int:
    """Print the effective settings of the configuration `name`, then the findings, errors last.

    Rewards are called on a few rows if `call` is true. The exit code is 1 if there is an error.
    """
    findings = look_over(config, gpu_gib, call=call)
    errors, absent = _count(findings, "error"), _count(findings, "later") + _count(findings, "not here")
    echo(*configfile.show(config).split("\n"), "")
    print_table(sorted(findings, key=lambda finding: finding.state == "error"))
    echo("", f"{name}: {errors} errors, {absent} subjects that cannot be checked here")
    return 1 if errors else 0


def look_over(config: Config, gpu_gib: float | None, *, call: bool = False) -> list[Finding]:
    """Make all checks of `config`; those with torch only if the others find no error.

    Rewards are called on a few rows if `call` is true.
    """
    with process.naming_prints():
        findings, loaded = light_checks.look(config)
        if _count(findings, "error"):
            text = "tokenizer, lengths of prompts and memory are checked once the errors are fixed"
            return [*findings, Finding("model", "later", text)]
        # Torch takes seconds to import, and other errors come first.
        from streamppo.commands.checks import torch_checks

        return torch_checks.add(findings, config, loaded, gpu_gib, call=call)


def _count(findings: Sequence[Finding], state: State) -> int:
    return sum(finding.state == state for finding in findings)


def print_table(findings: Sequence[Finding]) -> None:
    """Print findings, one in a line."""
    rows = table("", "", "")
    for column in rows.columns[:2]:
        column.no_wrap = True
    for finding in findings:
        rows.add_row(finding.subject, Text(finding.state, STYLES[finding.state]), finding.text)
    console().print(rows)
