"""Write out the short forms of a configuration file, so that the tree behind it has one shape.

[reward]                              [reward.scorers.reward]
function = "a:b"              ->      kind = "function"
                                      function = "a:b"

[task]                                [task]
kind = "data"                 ->      kind = "data"
data = "rows.jsonl"                   [task.sources.data]
                                      data = "rows.jsonl"
"""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple, cast, get_args

import msgspec

from streamppo.config.convert import Mistake
from streamppo.config.overrides import Tree
from streamppo.config.reward import Reward, Scorer
from streamppo.config.task import DataTask, Source


class Short(NamedTuple):
    """A table whose fields may be those of its only entry: `table` with the entries `entries`, of which one is `name`.

    `own` are the table's own fields, `inner` those of an entry, `kind` the kind of an entry that names none.
    """

    table: str
    entries: str
    name: str
    own: Sequence[str]
    inner: Sequence[str]
    kind: str | None

    @property
    def path(self) -> str:
        """The dotted name of the entry."""
        return f"{self.table}.{self.entries}.{self.name}"


def _names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


SCORER = Short(
    "reward",
    "scorers",
    "reward",
    _names(Reward),
    ["kind", *sorted({name for kind in get_args(Scorer) for name in _names(kind)})],
    "function",
)
SOURCE = Short("task", "sources", "data", ["kind", *_names(DataTask)], _names(Source), None)


class Expanded(NamedTuple):
    """The mistakes that were found, and {dotted name of an entry: the name under which the file has its fields}."""

    mistakes: list[Mistake]
    short: dict[str, str]


def expand(tree: Tree) -> Expanded:
    """Change `tree` in place. A mistaken field is taken out of it."""
    shorts = [SCORER]
    if _table(tree, "task").get("kind") == "data":
        shorts.append(SOURCE)
    mistakes = [mistake for short in shorts for mistake in _expand(tree, short)]
    return Expanded(mistakes, {short.path: short.table for short in shorts})


def _expand(tree: Tree, short: Short) -> list[Mistake]:
    table = _table(tree, short.table)
    loose = {name: table.pop(name) for name in list(table) if name not in short.own and _belongs_inside(name, short)}
    entries = _table(table, short.entries)
    if loose and entries.keys() - {short.name}:
        text = f"belongs into the [{short.table}.{short.entries}.NAME] tables, beside which it stands"
        return [Mistake(f"{short.table}.{name}", text, f"{short.table}.{name}") for name in loose]
    if loose:
        kind = {} if short.kind is None else {"kind": short.kind}
        table[short.entries] = {short.name: kind | _table(entries, short.name) | loose}
    return []


def _belongs_inside(name: str, short: Short) -> bool:
    """A name that is nearest to one of the table's own is a mistake in that one."""
    near = get_close_matches(name, [*short.inner, *short.own], n=1, cutoff=0.5)
    return not near or near[0] in short.inner


def _table(tree: Tree, name: str) -> Tree:
    found = tree.get(name)
    return cast(Tree, found) if isinstance(found, dict) else {}
