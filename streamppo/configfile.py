"""From a TOML file and dotted overrides to a `Config`, or to an error that says where and what instead.

A run keeps its configuration in its folder as config.json, which is read in the same way.
"""

import copy
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamppo import durable
from streamppo.config import Config
from streamppo.errors import ConfigError, RunError

CONFIG = "config.json"


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `overrides` ("learner.lr=3e-4"), check everything.

    Raises `ConfigError` with the file, the line and the nearest name of what is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        tree = parse(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not {kind}: {error}") from error
    return _resolve(tree, overrides, path, text)


def change(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with `overrides`. Raises `ConfigError` that names what is wrong with them."""
    return _resolve(msgspec.to_builtins(config), overrides, Path(CONFIG), "")


def save(config: Config, run: Path) -> None:
    """Keep `config` as that of the run in the folder `run`, which goes on with it. Raises `RunError`."""
    with durable.naming(run / CONFIG, RunError):
        durable.write(run / CONFIG, json.dumps(msgspec.to_builtins(config), indent=2).encode())


def show(config: Config) -> str:
    """The resolved tree, one dotted `name = value` per line, in the order of the file's sections."""
    return "\n".join(f"{name} = {_toml(value)}" for name, value in _leaves("", msgspec.to_builtins(config)))


def _resolve(tree: dict[str, Any], overrides: Sequence[str], path: Path, text: str) -> Config:
    """`tree`, which stands in `path` as `text`, with `overrides`."""
    named = _kinds_first([_split(override) for override in overrides])
    for name, value in named:
        _apply(tree, name, value)
    for name, _ in named:
        _name_default_kind(tree, name.rpartition(".")[0])
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), path, text, tree, {name for name, _ in named})) from error


def _split(override: str) -> tuple[str, Any]:
    """(dotted name, value) of "a.b.c=value", the value read as TOML; a bare word is a string."""
    name, equals, value = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"override {override!r} is not of the form section.field=value")
    return name.strip(), _value(value.strip())


def _kinds_first(named: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """A kind comes before the fields of its table, which would be lost with the former kind; else in order."""
    ordered: list[tuple[str, Any]] = []
    for name, value in named:
        place = len(ordered)
        # What sets this very kind, or a whole table around it, stays before it: the last word counts.
        while name.endswith(".kind") and place and not f"{name}.".startswith(f"{ordered[place - 1][0]}."):
            place -= 1
        ordered.insert(place, (name, value))
    return ordered


def _apply(tree: dict[str, Any], name: str, value: Any) -> None:
    """Another `kind` replaces the whole table, since the fields of two kinds have nothing to do with each other."""
    *parents, last = name.split(".")
    table: Any = tree
    for part in parents:
        # A section that is left out is null in a run's config.json.
        if table.get(part) is None:
            table[part] = {}
        table = table[part]
        if not isinstance(table, dict):
            raise ConfigError(f"override {name}: {part!r} is a value, not a section")
    if last == "kind" and table.get("kind") != value:
        table.clear()
    table[last] = value


def _name_default_kind(tree: dict[str, Any], where: str) -> None:
    """An override inside a table that the file leaves out means the default's kind."""
    table: Any = tree
    for part in where.split(".") if where else []:
        table = table[part]
    try:
        default = _walk(where, tree).default
    except (StopIteration, AssertionError):
        return
    tag = getattr(getattr(default, "__struct_config__", None), "tag", None)
    if tag is not None and "kind" not in table:
        table["kind"] = tag


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _leaves(prefix: str, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(f"{prefix}{name}.", value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield f"{prefix}{name}", value


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else repr(value)


# --- errors --------------------------------------------------------------------------------------------------


def _explain(message: str, path: Path, text: str, tree: Any, overridden: set[str]) -> str:
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
    for key in _walk(before, tree).tree if bracket else ():
        narrowed = copy.deepcopy(tree)
        table = _walk(before, narrowed).tree
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
    at = _walk(where, tree)
    return [field.encode_name for field in _struct(at.type, at.tree).fields]


def _kinds(where: str, tree: dict[str, Any]) -> list[str]:
    """The tags of the union at the dotted path `where`."""
    node = _walk(where, tree).type
    options = node.types if isinstance(node, msgspec.inspect.UnionType) else (node,)
    return [str(option.tag) for option in options if isinstance(option, msgspec.inspect.StructType)]


class At(NamedTuple):
    """What a dotted path leads to: the type, its default, and what the file has there."""

    type: Any
    default: Any
    tree: Any


def _walk(where: str, tree: Any) -> At:
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
