"""Reads a TOML file and dotted overrides into a `Config`, and writes it back.

    text --tomllib--> tree --overrides--> tree --expand--> tree of one shape --convert--> Config
                                                                             `--explain--> ConfigError, a line a mistake

A run keeps its configuration in its folder in the same format.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import tomli_w

from streamppo import durable
from streamppo.config import overrides as dotted
from streamppo.config import paths
from streamppo.config.convert import Mistake, convert
from streamppo.config.overrides import Tree
from streamppo.config.sections import Config
from streamppo.config.short_forms import as_kinds, expand, with_kinds
from streamppo.errors import CheckpointError, ConfigError, RunError

CONFIG = "config.toml"
"""The name of a run's configuration in its folder."""
WEIGHTS = (".safetensors", ".bin")


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `overrides` ("learner.lr=3e-4"), check everything.

    Relative paths in the file are resolved in its folder first, then in the current folder. Without a `name` the run
    has the file's name. Raises `ConfigError` with a line for every mistake: the file and the line or the override, and
    the nearest name.
    """
    try:
        # A file named by the user may be a shell's pipe, `<(...)`; a file in a run's folder may not.
        with durable.reading(path, whole=True) if path.name == CONFIG else path.open("rb") as file:
            # An editor may have put a byte order mark before it.
            text = file.read().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    paths.make_absolute(tree, path.parent)
    tree.setdefault("name", path.stem)
    return _resolve(tree, overrides, path, text)


def change(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with `overrides`. Raises `ConfigError` with a line for every mistake in them."""
    return _resolve(_plain(config), overrides, Path(CONFIG), "")


def save(config: Config, run: Path) -> None:
    """Write `config` as the configuration of the run in the folder `run`. Raises `RunError`."""
    with durable.naming(run / CONFIG, RunError):
        tree = _plain(config)
        paths.make_relative(tree, run)
        durable.write(run / CONFIG, tomli_w.dumps(tree).encode())


def existing(run: Path) -> Path:
    """The absolute path of a run's folder.

    Raises `CheckpointError` if it has no run, or an entry, not hidden, that is neither a file nor a folder: a read of a
    pipe may block for ever, and of a device never end. A sparse file is refused too: it may exhaust the memory.
    """
    run = run.resolve()
    if not (run / CONFIG).is_file():
        if (run / "config.json").is_file():
            raise CheckpointError(f"{run}: made by an earlier version of streamppo: only that version can continue it")
        raise CheckpointError(f"{run}: no run found")
    # A temporary file of a running run may be gone by now. Hidden files, such as an editor's lock, are never opened.
    shown = [path for path in run.iterdir() if not path.name.startswith(".")]
    if foreign := [path.name for path in shown if not (path.is_file() or path.is_dir()) and os.path.lexists(path)]:
        raise CheckpointError(f"{run / min(foreign)}: neither a file nor a folder; streamppo writes only these")
    # Not checked: files that SQLite and tokenizers read themselves, and weights, of which only a header is read.
    for path in (*run.iterdir(), *(run / "model").glob("*")):
        if path.suffix not in WEIGHTS and path.is_file() and durable.is_hollow(path):
            raise CheckpointError(f"{path}: {durable.HOLLOW}")
    return run


def show(config: Config) -> str:
    """The whole tree as TOML that `load` reads; fields without a value are omitted."""
    return tomli_w.dumps(_plain(config))


def _plain(config: Config) -> Tree:
    return _without_none(msgspec.to_builtins(config))


def _without_none(tree: Tree) -> Tree:
    return {
        name: _without_none(cast(Tree, value)) if isinstance(value, dict) else value
        for name, value in tree.items()
        if value is not None
    }


def _resolve(tree: Tree, overrides: Sequence[str], path: Path, text: str) -> Config:
    """The configuration of `tree` with `overrides`; `path` and its content `text` locate mistakes."""
    tree, parsed = with_kinds(tree), dotted.parse(overrides, as_kinds)
    wrong = dotted.apply(tree, parsed)
    paths.make_absolute(tree, Path())
    expanded = expand(tree)
    config, mistakes = convert(tree)
    names = [override.name for override in parsed]
    wrong += explain([*expanded.mistakes, *mistakes], path, text, names, expanded.short)
    if config is None or wrong:
        raise ConfigError("\n".join(wrong))
    return config


# --- the place of a mistake ----------------------------------------------------------------------------------


def explain(
    mistakes: Sequence[Mistake], path: Path, text: str, overridden: Sequence[str], short: Mapping[str, str]
) -> list[str]:
    """A line for each mistake, in the order of the file `path` with content `text`; `short` comes from `expand`."""
    written = [_as_written(mistake, short) for mistake in mistakes]
    lines = [(_find_line(mistake.at, text) or 0, mistake) for mistake in written]
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
        # The sentence of a rule between sections begins with the name of its field.
        return mistake.text.startswith(f"{override} ")
    return mistake.broad and f"{override}.".startswith(f"{mistake.at}.")


def _as_written(mistake: Mistake, short: Mapping[str, str]) -> Mistake:
    for entry, written in short.items():
        if f"{mistake.name}.".startswith(f"{entry}."):
            return mistake._replace(
                name=written + mistake.name.removeprefix(entry), at=written + mistake.at.removeprefix(entry)
            )
    return mistake


def _find_line(name: str, text: str) -> int | None:
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
