"""A finding: one line of the table that `check` prints."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

State = Literal["ok", "note", "later", "not here", "error"]


class Finding(NamedTuple):
    """A subject, its state, and a sentence about it."""

    subject: str
    state: State
    text: str


Findings = Iterator[Finding]


def first_line(error: BaseException) -> str:
    """Shorten the message of a library to its first line, or to the name of the exception if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reward_subject(name: str) -> str:
    """Name the subject of a finding about a scorer; the scorer of [reward] itself is called "reward"."""
    return "reward" if name == "reward" else f"reward {name}"
