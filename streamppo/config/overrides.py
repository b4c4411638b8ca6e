"""Apply dotted overrides ("learner.lr=3e-4") to the tree of a configuration file."""

import tomllib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

from streamppo.errors import ConfigError

Tree: TypeAlias = dict[str, object]
"""A table of a TOML file, as its parser makes it."""


class Override(NamedTuple):
    """One override: the dotted name of a field or a section, and its value as TOML has it."""

    name: str
    value: object


Rewrite: TypeAlias = Callable[[Sequence[Override]], list[Override]]
"""Writes out the short forms of overrides."""


def parse(texts: Sequence[str], rewrite: Rewrite = list) -> list[Override]:
    """The overrides that `texts` say. Raises `ConfigError` with every text that is not section.field=value."""
    wrong = [text for text in texts if not text.partition("=")[0].strip() or "=" not in text]
    if wrong:
        raise ConfigError("\n".join(f"override {text!r} is not of the form section.field=value" for text in wrong))
    parts = [text.partition("=") for text in texts]
    return _kinds_first(rewrite([Override(name.strip(), _value(value.strip())) for name, _, value in parts]))


def apply(tree: Tree, overrides: Sequence[Override]) -> list[str]:
    """Change `tree` in place. Returns a sentence for each override that runs into a value on its way."""
    return [mistake for override in overrides if (mistake := _apply(tree, override))]


def _kinds_first(named: Sequence[Override]) -> list[Override]:
    """A kind comes before the fields of its table, which would be lost with the former kind; else in order."""
    ordered: list[Override] = []
    for override in named:
        place = len(ordered)
        # An override of this very kind, or of a whole table around it, stays before it: the last word counts.
        while override.name.endswith(".kind") and place and not _covers(ordered[place - 1].name, override.name):
            place -= 1
        ordered.insert(place, override)
    return ordered


def _covers(name: str, other: str) -> bool:
    return f"{other}.".startswith(f"{name}.")


def _apply(tree: Tree, override: Override) -> str | None:
    """Another `kind` empties the table first, since the fields of two kinds have nothing to do with each other."""
    *parents, last = override.name.split(".")
    table = tree
    for depth, part in enumerate(parents, start=1):
        inner = table.setdefault(part, {})
        if last == "kind" and depth == len(parents) and not isinstance(inner, dict):
            # A number gives way to a choice: queue.max_lag = 2, and queue.max_lag.kind=adaptive.
            inner = table[part] = {}
        if not isinstance(inner, dict):
            return f"override {override.name}: {part!r} is a value, not a section"
        table = cast(Tree, inner)
    if last == "kind" and table.get("kind") != override.value:
        table.clear()
    table[last] = override.value
    return None


def _value(text: str) -> object:
    """`text` as TOML; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
