"""`streamppo check`: mistakes in a configuration, found before anything is started. No Ray, no GPU, no network.

ok         looked at, and as a run needs it
note       works, and is probably not meant
later      seen when a run starts
not here   not on this machine; it may be where the run will be, and no run starts here without it
error      no run can be made of it

Mistakes that need no torch are found first. Memory, the tokenizer and scores of rows
are looked at only if there are none.
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
    print_table(sorted(findings, key=lambda one: one.state == "error"))
    echo("", f"{name}: {errors} errors, {absent} things that cannot be looked at here")
    return 1 if errors else 0


def look_over(config: Config, gpu_gib: float | None, *, call: bool = False) -> list[Finding]:
    """Find everything there is to say about `config`; what needs torch only if there is no error before.

    Rewards are called on a few rows if `call` is true.
    """
    with process.naming_prints():
        findings = list(light_checks.findings(config))
        if _count(findings, "error"):
            text = "tokenizer, lengths of prompts and memory are looked at once the errors are mended"
            return [*findings, Finding("model", "later", text)]
        # Torch takes seconds to import, and is no use to somebody who has a mistake to mend.
        from streamppo.commands.checks import torch_checks

        return torch_checks.add(findings, config, gpu_gib, call=call)


def _count(findings: Sequence[Finding], state: State) -> int:
    return sum(one.state == state for one in findings)


def print_table(findings: Sequence[Finding]) -> None:
    """Print findings, one in a line."""
    rows = table("", "", "")
    for column in rows.columns[:2]:
        column.no_wrap = True
    for one in findings:
        rows.add_row(one.subject, Text(one.state, STYLES[one.state]), one.text)
    console().print(rows)
