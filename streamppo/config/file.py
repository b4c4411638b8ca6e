"""From a TOML file and dotted overrides to a `Config`, or to an error that says where and what instead.

A run keeps its configuration in its folder as config.json, which is read in the same way.
"""

# A file's tree is what its parser makes of it, untyped.
# pyright: standard

import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamppo import durable
from streamppo.config.explain import explain, walk
from streamppo.config.sections import Config
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
        raise ConfigError(explain(str(error), path, text, tree, {name for name, _ in named})) from error


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
        default = walk(where, tree).default
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
