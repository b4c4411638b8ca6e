"""What a mistake in a configuration is called: where it stands, and the nearest name."""

# A file's tree is what its parser makes of it, untyped.
# pyright: standard

import copy
import difflib
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamppo.config.sections import Config


def explain(message: str, path: Path, text: str, tree: Any, overridden: set[str]) -> str:
    """msgspec's message plus where in the file, and the nearest name for an unknown field."""
    body, _, at = message.partition(" - at ")
    where = _with_key(at.strip("`").removeprefix("$").lstrip("."), message, tree)
    unknown = re.search(r"unknown field `(.+?)`", body)
    name = ".".join(part for part in (where, unknown and unknown[1]) if part)
    hint = ""
    if unknown:
        names = _known_fields(where, tree)
        near = difflib.get_close_matches(unknown[1], names, n=1, cutoff=0.5)
        body = f"unknown field {unknown[1]!r}"
        hint = f": did you mean {near[0]!r}?" if near else f": known here are {', '.join(sorted(names))}"
    if name.endswith(".kind"):
        hint = f"; kinds are {', '.join(_kinds(name.removesuffix('.kind'), tree))}"
    within = (f"{changed}.".startswith(f"{name}.") or f"{name}.".startswith(f"{changed}.") for changed in overridden)
    if name and any(within):
        return f"override {name}: {body}{hint}"
    line = _line_of(name, text)
    return f"{path}{f':{line}' if line else ''}: {f'{name}: ' if name else ''}{body}{hint}"


def _with_key(where: str, message: str, tree: dict[str, Any]) -> str:
    """msgspec says `sources[...]` for a table of tables: the name of the one that is meant."""
    before, bracket, after = where.partition("[...]")
    for key in walk(before, tree).tree if bracket else ():
        narrowed = copy.deepcopy(tree)
        table = walk(before, narrowed).tree
        for other in table.keys() - {key}:
            del table[other]
        try:
            msgspec.convert(narrowed, Config)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return f"{before}.{key}{after}"
    return where


def _known_fields(where: str, tree: dict[str, Any]) -> list[str]:
    """The fields of the struct at the dotted path `where`; for a union, of the kind that the file chose."""
    at = walk(where, tree)
    return [field.encode_name for field in _struct(at.type, at.tree).fields]


def _kinds(where: str, tree: dict[str, Any]) -> list[str]:
    """The tags of the union at the dotted path `where`."""
    node = walk(where, tree).type
    options = node.types if isinstance(node, msgspec.inspect.UnionType) else (node,)
    return [str(option.tag) for option in options if isinstance(option, msgspec.inspect.StructType)]


class At(NamedTuple):
    """What a dotted path leads to: the type, its default, and what the file has there."""

    type: Any
    default: Any
    tree: Any


def walk(where: str, tree: Any) -> At:
    """Raises StopIteration where the path leads to no field."""
    node: Any = msgspec.inspect.type_info(Config)
    default: Any = msgspec.NODEFAULT
    for part in where.split(".") if where else []:
        if isinstance(node, msgspec.inspect.DictType):
            node, default = node.value_type, msgspec.NODEFAULT
        else:
            field = next(field for field in _struct(node, tree).fields if field.encode_name == part)
            node, default = field.type, field.default
        tree = tree.get(part, {}) if isinstance(tree, dict) else {}
    return At(node, default, tree)


def _struct(node: Any, tree: Any) -> msgspec.inspect.StructType:
    if isinstance(node, msgspec.inspect.UnionType):
        options = [option for option in node.types if isinstance(option, msgspec.inspect.StructType)]
        chosen = [option for option in options if option.tag == tree.get("kind")]
        return (chosen or options)[0]
    assert isinstance(node, msgspec.inspect.StructType), node
    return node


def _line_of(name: str, text: str) -> int | None:
    """The line of the file that sets the dotted `name`, or that opens its table."""
    table, best = "", None
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([\w.\-]+)\s*\]", line)
        key = re.match(r"\s*([\w.\-]+)\s*=", line)
        table = header[1] if header else table
        full = table if header else f"{table}.{key[1]}".lstrip(".") if key else ""
        if full and full == name:
            return number
        if full and name.startswith(f"{full}."):
            best = number
    return best
