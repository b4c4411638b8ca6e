"""A finding, which is one line of the table that `check`, `doctor` and `init` print."""

import os
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rich.text import Text

from streamppo.commands.console import console, table

State = Literal["ok", "note", "later", "not here", "error"]
STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "later": "cyan", "not here": "cyan", "error": "bold red"}


class Finding(NamedTuple):
    """A subject, its state, and a sentence about it."""

    subject: str
    state: State
    text: str


Findings = Iterator[Finding]


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table with a line for each finding."""
    rows = table("", "", "")
    for column in rows.columns[:2]:
        column.no_wrap = True
    for finding in findings:
        rows.add_row(finding.subject, Text(finding.state, STYLES[finding.state]), finding.text)
    console().print(rows)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the exception's name if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def where_it_was(path: str) -> str:
    """Return the end of a sentence about a missing file: where a relative path was searched, or a remedy."""
    if os.path.isabs(path):
        return ": if it was moved, correct its path, in a run by `streamppo resume RUN section.field=PATH`"
    return f" (looked at {os.path.abspath(path)})"


def contacted_later(subject: str, url: str, key_env: str) -> Finding:
    """Return the finding that a run will contact `url`, with a note if the environment has no variable `key_env`."""
    key = f"; the environment has no {key_env} here" if key_env and not os.environ.get(key_env) else ""
    return Finding(subject, "later", f"{url} is contacted when the run starts{key}")


def reward_subject(name: str) -> str:
    """Return the subject of a finding about the scorer `name`."""
    return "reward" if name == "reward" else f"reward {name}"
