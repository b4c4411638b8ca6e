"""Applies dotted overrides ("learner.lr=3e-4") to the tree of a configuration file."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

from streamppo.errors import ConfigError

Tree: TypeAlias = dict[str, object]


class Override(NamedTuple):
    """One override: the dotted name of a field or section, its parsed TOML value, and the value's text if it had one.

    Example: a text field gets the text of `name=2024-11-30`, whose value is a date.
    """

    name: str
    value: object
    text: str | None = None


Rewrite: TypeAlias = Callable[[Sequence[Override]], list[Override]]
"""A function that replaces short forms of overrides by complete overrides."""
BARE_WORD = re.compile(r"(?<=[\[,=])[^\[\]{},=\"']+(?=[],}])")
"""A word without quotes in a list or table, with the spaces around it."""


def parse(texts: Sequence[str], rewrite: Rewrite = list) -> list[Override]:
    """Parse overrides. Raises `ConfigError` with a line for every text that is not exactly one section.field=value."""
    invalid = [text for text in texts if not text.partition("=")[0].strip() or "=" not in text]
    if invalid:
        raise ConfigError("\n".join(f"override {text!r} is not of the form section.field=value" for text in invalid))
    parts = [(name.strip(), value.strip()) for name, _, value in (text.partition("=") for text in texts)]
    if invalid := [text for text, (_, value) in zip(texts, parts, strict=True) if len(_tree(value)) > 1]:
        raise ConfigError(
            "\n".join(f"override {text!r} sets more than one field: give each by itself" for text in invalid)
        )
    # Text that is not TOML is a string.
    return _kinds_first(rewrite([Override(name, _tree(value).get("value", value), value) for name, value in parts]))


def apply(tree: Tree, overrides: Sequence[Override]) -> list[str]:
    """Set the values in `tree`, in place. Returns a sentence for each name inside a value, such as learner.lr.x."""
    return [mistake for override in overrides if (mistake := _apply(tree, override))]


def _kinds_first(named: Sequence[Override]) -> list[Override]:
    """Move each `kind` before the fields of its table: a new kind empties the table."""
    ordered: list[Override] = []
    for override in named:
        place = len(ordered)
        # A `kind` stays after an override of the same `kind` or of a table around it: the last override counts.
        while override.name.endswith(".kind") and place and not covers(ordered[place - 1].name, override.name):
            place -= 1
        ordered.insert(place, override)
    return ordered


def covers(name: str, other: str) -> bool:
    """Return True if the dotted `name` is `other`, or the name of a table around `other`."""
    return f"{other}.".startswith(f"{name}.")


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name after `prefix`, value) for all values that are not tables, and for empty tables."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(cast(Tree, value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _apply(tree: Tree, override: Override) -> str | None:
    """Set one value. A new `kind` first empties its table, whose fields belong to the previous kind."""
    *parents, last = override.name.split(".")
    table = tree
    for depth, part in enumerate(parents, start=1):
        inner = table.setdefault(part, {})
        if last == "kind" and depth == len(parents) and not isinstance(inner, dict):
            # A table replaces a number: the file has queue.max_lag = 2, the override is queue.max_lag.kind=adaptive.
            inner = table[part] = {}
        if not isinstance(inner, dict):
            return f"override {override.name}: {part!r} is a value, not a section"
        table = cast(Tree, inner)
    if last == "kind" and table.get("kind") != override.value:
        table.clear()
    table[last] = override.value
    return None


def _tree(text: str) -> Tree:
    """Return the table of a TOML file whose only line is `value = text`; {} if the line is invalid.

    Shells remove quotes, so a word in a list or table needs none: `[mlflow, wandb]` is `["mlflow", "wandb"]`.
    """
    return _parse(text) or (_parse(BARE_WORD.sub(_quote, text)) if text.startswith(("[", "{")) else {})


def _quote(word: re.Match[str]) -> str:
    return word[0] if _parse(word[0]) else json.dumps(word[0].strip())


def _parse(text: str) -> Tree:
    try:
        return tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
