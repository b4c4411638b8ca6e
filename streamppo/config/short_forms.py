"""Replaces the short forms in a configuration file by tables of one shape.

[reward]                              [reward.scorers.reward]
function = "a:b"              ->      kind = "function"
                                      function = "a:b"

[task]                                [task]
data = "rows.jsonl"           ->      kind = "data"
                                      [task.sources.data]
                                      data = "rows.jsonl"

[algorithm]                           [algorithm]
advantage = "grpo"            ->      advantage = { kind = "grpo" }
filters = ["truncated"]       ->      filters = [{ kind = "truncated" }]
"""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple, cast, get_args

import msgspec
from msgspec import inspect

from streamppo.config.convert import Mistake
from streamppo.config.overrides import Override, Tree, covers
from streamppo.config.reward import Reward, Scorer
from streamppo.config.sections import Config
from streamppo.config.task import DataTask, Source


class ShortForm(NamedTuple):
    """A short form: the table `table` may have the fields of its table `entries.name`, if `entries` has no other.

    `outer` are the fields of `table`, `inner` the fields of a table in `entries`, and `kind` is its default kind.
    """

    table: str
    entries: str
    name: str
    outer: Sequence[str]
    inner: Sequence[str]
    kind: str | None

    @property
    def path(self) -> str:
        return f"{self.table}.{self.entries}.{self.name}"


def _names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


SCORER = ShortForm(
    "reward",
    "scorers",
    "reward",
    _names(Reward),
    ["kind", *sorted({name for kind in get_args(Scorer) for name in _names(kind)})],
    "function",
)
SOURCE = ShortForm("task", "sources", "data", ["kind", *_names(DataTask)], _names(Source), None)


class ExpandedTree(NamedTuple):
    """The mistakes, and for each expanded table (dotted name) the table that had its fields in the file."""

    mistakes: list[Mistake]
    short: dict[str, str]


def expand(tree: Tree) -> ExpandedTree:
    """Expand the short forms in `tree` in place. Misplaced fields are removed from `tree` and reported."""
    shorts, task = [SCORER], _table(tree, "task")
    if "kind" not in task and task.keys() & {"data", "sources"}:
        task["kind"] = "data"
    if task.get("kind") == "data":
        shorts.append(SOURCE)
    environment = _table(tree, "environment")
    if environment and "kind" not in environment:
        environment["kind"] = "agent" if environment.keys() & {"agent", "command"} else "class"
    mistakes = [mistake for short in shorts for mistake in _expand(tree, short)]
    return ExpandedTree(mistakes, {short.path: short.table for short in shorts})


def _expand(tree: Tree, short: ShortForm) -> list[Mistake]:
    table = _table(tree, short.table)
    loose = {name: table.pop(name) for name in list(table) if name not in short.outer and _belongs_inside(name, short)}
    entries = _table(table, short.entries)
    if loose and entries.keys() - {short.name}:
        text = f"belongs into the [{short.table}.{short.entries}.NAME] tables, next to it"
        return [Mistake(f"{short.table}.{name}", text, f"{short.table}.{name}") for name in loose]
    if loose:
        kind = {} if short.kind is None else {"kind": short.kind}
        table[short.entries] = {short.name: kind | _table(entries, short.name) | loose}
    return []


def _belongs_inside(name: str, short: ShortForm) -> bool:
    """Return whether `name` is, or is most similar to, a field of an entry, or is similar to no field."""
    near = get_close_matches(name, [*short.inner, *short.outer], n=1, cutoff=0.5)
    return not near or near[0] in short.inner


def _table(tree: Tree, name: str) -> Tree:
    table = tree.get(name)
    return cast(Tree, table) if isinstance(table, dict) else {}


def with_kinds(tree: Tree) -> Tree:
    """Replace each kind that is written as a string by a table: `advantage = "grpo"` -> `{ kind = "grpo" }`."""
    return cast(Tree, _with_kinds((_root(),), tree))


def as_kinds(overrides: Sequence[Override]) -> list[Override]:
    """Let each override whose value is a kind set `kind`: algorithm.advantage=grpo sets algorithm.advantage.kind.

    A text field gets the override's text, even if this is a number, a date or true in TOML.
    """
    return [_as_kind(override) for override in overrides]


def _as_kind(override: Override) -> Override:
    nodes = _types_of(override.name)
    if isinstance(override.value, str) and _is_choice(nodes, override.value):
        return Override(f"{override.name}.kind", override.value)
    is_other = override.text is not None and type(override.value) not in (str, list, dict)
    if is_other and _are_texts([*nodes, *_types_in_short_forms(override.name)]):
        return override._replace(value=override.text)
    return override._replace(value=_with_kinds(nodes, override.value))


def _types_of(name: str) -> tuple[inspect.Type, ...]:
    """Return the types of the field with the dotted `name`; none if there is no such field."""
    nodes: tuple[inspect.Type, ...] = (_root(),)
    for part in name.split("."):
        nodes = tuple(_field_types(nodes, part))
    return nodes


def _types_in_short_forms(name: str) -> Iterator[inspect.Type]:
    for short in (SCORER, SOURCE):
        if covers(short.table, name):
            yield from _types_of(f"{short.path}{name.removeprefix(short.table)}")


def _are_texts(nodes: Sequence[inspect.Type]) -> bool:
    """Return whether the field is a text in every kind that has it."""
    options = [option for option in _alternatives(nodes) if not isinstance(option, inspect.NoneType)]
    return bool(options) and all(isinstance(option, inspect.StrType) for option in options)


@cache
def _root() -> inspect.Type:
    return inspect.type_info(Config)


def _with_kinds(nodes: Sequence[inspect.Type], value: object) -> object:
    """Return `value`, whose type is one of `nodes`, with a table in place of each kind."""
    if isinstance(value, str) and _is_choice(nodes, value):
        return {"kind": value}
    if isinstance(value, list):
        items = [node.item_type for node in _alternatives(nodes) if isinstance(node, inspect.VarTupleType)]
        return [_with_kinds(items, item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        table = cast(Tree, value)
        return {name: _with_kinds(tuple(_field_types(nodes, name)), part) for name, part in table.items()}
    return value


def _is_choice(nodes: Sequence[inspect.Type], value: str) -> bool:
    """Return whether `value` is a kind. If `nodes` allow only kinds, any string counts, otherwise only a known kind."""
    options = list(_alternatives(nodes))
    tags = [option.tag for option in options if isinstance(option, inspect.StructType) and option.tag_field == "kind"]
    others = (inspect.StructType, inspect.NoneType)
    return bool(tags) and (value in tags or all(isinstance(option, others) for option in options))


def _field_types(nodes: Sequence[inspect.Type], name: str) -> Iterator[inspect.Type]:
    for node in _alternatives(nodes):
        if isinstance(node, inspect.StructType):
            yield from (field.type for field in node.fields if field.encode_name == name)
        elif isinstance(node, inspect.DictType):
            yield node.value_type


def _alternatives(nodes: Sequence[inspect.Type]) -> Iterator[inspect.Type]:
    for node in nodes:
        yield from node.types if isinstance(node, inspect.UnionType) else (node,)
