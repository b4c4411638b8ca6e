"""Locates each mistake in a configuration: in an override, or in a line of the file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from streamppo.config.convert import Mistake


def explain(
    mistakes: Sequence[Mistake], path: Path, text: str, overridden: Sequence[str], short: Mapping[str, str]
) -> list[str]:
    """One line for each mistake, in the order of the file `path` with content `text`; `short` is the result of
    `expand`."""
    written = [_as_written(mistake, short) for mistake in mistakes]
    lines = [(_line_of(mistake.at, text) or 0, mistake) for mistake in written]
    ordered = sorted(lines, key=lambda pair: pair[0])
    return list(dict.fromkeys(_sentence(mistake, path, line, overridden) for line, mistake in ordered))


def _sentence(mistake: Mistake, path: Path, line: int, overridden: Sequence[str]) -> str:
    named = f"{mistake.name}: " if mistake.name else ""
    if any(_about(mistake, override) for override in overridden):
        return f"override {named}{mistake.text}"
    return f"{path}{f':{line}' if line else ''}: {named}{mistake.text}"


def _about(mistake: Mistake, override: str) -> bool:
    """True if the override caused the mistake: it set this field, a table around it, or a contradicting field."""
    if f"{mistake.at}.".startswith(f"{override}."):
        return True
    if mistake.broad and not mistake.at:
        # A rule between all sections begins with the field that it is about.
        return mistake.text.startswith(f"{override} ")
    return mistake.broad and f"{override}.".startswith(f"{mistake.at}.")


def _as_written(mistake: Mistake, short: Mapping[str, str]) -> Mistake:
    for entry, written in short.items():
        if f"{mistake.name}.".startswith(f"{entry}."):
            return mistake._replace(
                name=written + mistake.name.removeprefix(entry), at=written + mistake.at.removeprefix(entry)
            )
    return mistake


def _line_of(name: str, text: str) -> int | None:
    """The line of the file that sets the dotted `name`, or else the line of the innermost table around it."""
    best: tuple[int, int] | None = None
    for number, full in _set(text):
        if full == name:
            return number
        if name.startswith(f"{full}.") and (best is None or len(full) >= best[0]):
            best = len(full), number
    return best and best[1]


def _set(text: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every table header and every key."""
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([\w.\-]+)\s*\]", line):
            table = header[1]
            yield number, table
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            yield number, f"{table}.{key[1]}".lstrip(".")
