"""Converts the parsed TOML of a configuration to a `Config`, or lists all mistakes in it."""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

from msgspec import NODEFAULT, inspect

from streamppo.config import hints
from streamppo.config.hints import join_names
from streamppo.config.overrides import Tree
from streamppo.config.sections import Config


class Mistake(NamedTuple):
    """A mistake in the field or table `name`, which the file sets at `at`. `broad`: it is about several fields."""

    name: str
    text: str
    at: str
    broad: bool = False


SCALARS = (inspect.BoolType, inspect.StrType, inspect.LiteralType, inspect.IntType, inspect.FloatType)
INVALID = object()
BITS = 63
"""Bits of an integer without its sign: integers are encoded in 64 bits."""
MOST = 2**BITS - 1
BOUNDS = {"gt": "above {}", "ge": "of at least {}", "lt": "below {}", "le": "of at most {}"}
"""The words of a message for each kind of bound."""


def convert(tree: Tree) -> tuple[Config | None, list[Mistake]]:
    """Return (the configuration in `tree`, []) or (None, its mistakes in the order of the sections)."""
    reader = _Reader()
    converted = reader.value(inspect.type_info(Config), tree, "")
    return (converted if isinstance(converted, Config) else None), reader.mistakes


class _Reader:
    def __init__(self) -> None:
        self.mistakes: list[Mistake] = []

    def value(self, node: inspect.Type, value: object, name: str, default: object = NODEFAULT) -> object:
        """Return `value` as type `node`, or `INVALID`. `default` is the default of the field."""
        match node:
            case inspect.StructType():
                return self._struct(node, value, name)
            case inspect.UnionType():
                return self._union(node, value, name, default)
            case inspect.DictType():
                return self._dict(node, value, name)
            case inspect.TupleType():
                return self._items(node, node.item_types, value, name)
            case inspect.VarTupleType(item_type=inspect.StructType() | inspect.UnionType() as item):
                return self._tables(node, item, value, name)
            case inspect.VarTupleType():
                return self._items(node, [node.item_type] * len(_items(value) or ()), value, name)
            case _:
                converted = _scalar(node, value)
                return self._type_mistake(node, value, name) if converted is INVALID else converted

    def _add_mistake(self, name: str, text: str, at: str | None = None, *, broad: bool = False) -> object:
        self.mistakes.append(Mistake(name, text, name if at is None else at, broad))
        return INVALID

    def _type_mistake(self, node: inspect.Type, value: object, name: str) -> object:
        too_large = isinstance(value, int) and value > MOST and isinstance(node, inspect.IntType)
        most = f" and at most {MOST}" if too_large else ""
        return self._add_mistake(name, f"must be {describe_type(node)}{most}, not {format_value(value)}")

    def _struct(self, node: inspect.StructType, value: object, name: str) -> object:
        if not isinstance(value, dict):
            return self._type_mistake(node, value, name)
        tree = cast(Tree, value)
        known = [field.encode_name for field in node.fields]
        present = {key: part for key, part in tree.items() if key != node.tag_field}
        before = len(self.mistakes)
        for key in present.keys() - set(known):
            for at, text in hints.unknown(_join(name, key), tree[key], known):
                self._add_mistake(at, text, broad=_is_table(tree[key]))
        parts: dict[str, object] = {}
        for field in node.fields:
            at = _join(name, field.encode_name)
            if field.encode_name in present:
                parts[field.name] = self.value(field.type, present[field.encode_name], at, field.default)
            elif field.required:
                self._add_mistake(name, f"missing required field `{field.encode_name}`", _join(name, "kind"))
        return INVALID if len(self.mistakes) > before else self._build(node, parts, name)

    def _build(self, node: inspect.StructType, parts: dict[str, object], name: str) -> object:
        try:
            return node.cls(**parts)
        except ValueError as error:
            for sentence in str(error).splitlines():
                self._add_mistake(name, sentence, broad=True)
            return INVALID

    def _dict(self, node: inspect.DictType, value: object, name: str) -> object:
        if not isinstance(value, dict):
            return self._type_mistake(node, value, name)
        tree = cast(Tree, value)
        converted = {key: self.value(node.value_type, part, _join(name, key)) for key, part in tree.items()}
        return INVALID if INVALID in converted.values() else converted

    def _union(self, node: inspect.UnionType, value: object, name: str, default: object) -> object:
        if value is None and any(isinstance(option, inspect.NoneType) for option in node.types):
            return None
        structs = [option for option in node.types if isinstance(option, inspect.StructType)]
        if structs and (_is_table(value) or not any(isinstance(option, SCALARS) for option in node.types)):
            return self._kind(structs, value, name, default)
        for option in node.types:
            if (converted := _scalar(option, value)) is not INVALID:
                return converted
        return self._type_mistake(node, value, name)

    def _kind(self, structs: Sequence[inspect.StructType], value: object, name: str, default: object) -> object:
        """Read a table with a `kind`. A missing `kind` is the kind of the field's default."""
        if structs[0].tag is None or not isinstance(value, dict):
            return self._struct(structs[0], value, name)
        tags = {str(struct.tag): struct for struct in structs}
        tree, at = cast(Tree, value), _join(name, "kind")
        tag = tree.get("kind", getattr(getattr(default, "__struct_config__", None), "tag", None))
        if tag is None:
            return self._add_mistake(name, f"missing required field `kind`: kinds are {', '.join(tags)}", at)
        if not isinstance(tag, str) or tag not in tags:
            return self._add_mistake(at, f"unknown kind {format_value(tag)}: kinds are {', '.join(tags)}")
        return self._struct(tags[tag], tree, name)

    def _items(self, node: inspect.Type, types: Sequence[inspect.Type], value: object, name: str) -> object:
        items = _items(value)
        if items is None or len(items) != len(types):
            return self._type_mistake(node, value, name)
        converted = tuple(_scalar(inner, item) for inner, item in zip(types, items, strict=True))
        return self._type_mistake(node, value, name) if INVALID in converted else converted

    def _tables(self, node: inspect.Type, item: inspect.Type, value: object, name: str) -> object:
        """Read a list of tables. A mistake in a table is reported at the line of the list."""
        tables, before = _items(value), len(self.mistakes)
        if tables is None:
            return self._type_mistake(node, value, name)
        converted = tuple(self.value(item, table, f"{name}[{place}]") for place, table in enumerate(tables))
        self.mistakes[before:] = [mistake._replace(at=name) for mistake in self.mistakes[before:]]
        return INVALID if len(self.mistakes) > before else converted


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _items(value: object) -> Sequence[object] | None:
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else None


def _scalar(node: inspect.Type, value: object) -> object:
    match node, value:
        case (inspect.BoolType(), bool()) | (inspect.StrType(), str()):
            return value
        case inspect.LiteralType(values=values), str() | int():
            return value if value in values else INVALID
        case (_, bool()):
            return INVALID
        case inspect.IntType(), int():
            return value if abs(value) < 2**BITS and _is_within(node, value) else INVALID
        case inspect.FloatType(), int() | float():
            return float(value) if math.isfinite(value) and _is_within(node, value) else INVALID
        case _:
            return INVALID


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_within(node: inspect.IntType | inspect.FloatType, value: float) -> bool:
    above = (node.gt is None or value > node.gt) and (node.ge is None or value >= node.ge)
    return above and (node.lt is None or value < node.lt) and (node.le is None or value <= node.le)


def describe_type(node: inspect.Type) -> str:
    """Describe in words the values that a type allows, for example "a number above 0"."""
    match node:
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a text"
        case inspect.IntType():
            return _bounded("a whole number", node)
        case inspect.FloatType():
            return _bounded("a number", node)
        case inspect.LiteralType(values=values):
            return join_names([f'"{value}"' for value in values], "or")
        case inspect.TupleType(item_types=types):
            return f"a list of {len(types)}: {join_names([describe_type(item) for item in types])}"
        case inspect.VarTupleType(item_type=item):
            return f"a list, each of it {describe_type(item)}"
        case inspect.UnionType(types=types):
            words = [describe_type(option) for option in types if not isinstance(option, inspect.NoneType)]
            return join_names(list(dict.fromkeys(words)), "or")
        case _:
            return "a table"


def format_value(value: object) -> str:
    """Return a value in TOML's notation; "a table" for a table."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _bounded(noun: str, node: inspect.IntType | inspect.FloatType) -> str:
    bounds = {"gt": node.gt, "ge": node.ge, "lt": node.lt, "le": node.le}
    words = [BOUNDS[name].format(f"{bound:g}") for name, bound in bounds.items() if bound is not None]
    return " ".join([noun, " and ".join(words)]) if words else noun
