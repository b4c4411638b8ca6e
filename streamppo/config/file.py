"""Reads a TOML file and dotted overrides into a `Config`, and writes it back.

    text --tomllib--> tree --overrides--> tree --expand--> tree of one shape --convert--> Config
                                                                             `--explain--> ConfigError, a line a mistake

A run stores its configuration in its folder in the same format. A relative path in a file is resolved in the file's
folder, or the folder of a link's target, or else in the current folder. A path in an override is resolved in the
current folder. A run stores absolute paths, so it can be resumed from any folder. It also stores its own folder, so it
can be moved or copied with its files.

Example: /a/runs/math with /a/rows.jsonl is copied to /b/runs/math. `load` takes /b/rows.jsonl if it exists, and
otherwise /a/rows.jsonl.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import tomli_w

from streamppo import durable
from streamppo.config import overrides as dotted
from streamppo.config.convert import Mistake, convert
from streamppo.config.overrides import Override, Tree
from streamppo.config.sections import Config
from streamppo.config.short_forms import as_kinds, expand, with_kinds
from streamppo.errors import CheckpointError, ConfigError, RunError

CONFIG = "config.toml"
RUN_FOLDER = "run_folder"
"""The key in a run's file with the run's folder at that time. It is not a field."""
REWARD = "reward.py"
"""The file in a run's folder with the source of a reward that a script or notebook defined."""
DATA = "data.jsonl"
"""The file in a run's folder with the rows that a script or notebook gave."""
FIELDS = Path("config")
"""Stands for the file in errors about a configuration that a script or notebook gave as a dict."""
WEIGHTS = (".safetensors", ".bin")
PATHS: Mapping[str, tuple[str, ...]] = {
    "model": ("path",),
    "task": ("data", "evaluation", "environment"),
    "reward": ("function", "path", "sandbox", "environment"),
    "environment": ("name", "agent", "command", "files", "environment"),
    "algorithm": ("function", "model", "pretrain"),
    "rollout": ("limit",),
}
"""The fields that may contain a path, at any depth, by section."""
SHOWN = 5
"""Maximum number of runs that an error about a folder of runs names."""


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the configuration in `path`, apply `overrides`, and check it all. Raises `ConfigError` with all mistakes."""
    try:
        # A file that the user names may be a shell's pipe, `<(...)`. A file in a run's folder must not be a pipe.
        with durable.reading(path, whole=True) if path.name == CONFIG else path.open("rb") as file:
            # The file may begin with a byte order mark.
            text = file.read().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except IsADirectoryError as error:
        use = "a folder, not a TOML file"
        if (path / CONFIG).is_file():
            use = f"the folder of a run; `streamppo resume {shlex.quote(str(path))}` continues it"
        raise ConfigError(f"cannot read {path}: {use}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    former = tree.pop(RUN_FOLDER, None)
    if path.name == CONFIG and isinstance(former, str) and os.path.isabs(former):
        _relocate(tree, former, path.parent.resolve())
    for folder in (path.parent, path.resolve().parent):
        _make_absolute(tree, folder)
    tree.setdefault("name", path.stem)
    return _resolve(tree, overrides, path, text)


def from_fields(fields: Mapping[str, object], overrides: Sequence[str] = ()) -> Config:
    """Return the configuration with `fields`, whose names may be dotted, and `overrides`. Raises `ConfigError`."""
    tree: Tree = {"name": "run"}
    named = as_kinds([Override(name, value) for name, value in fields.items()])
    if sentences := dotted.apply(tree, named):
        raise ConfigError("\n".join(sentences))
    return _resolve(tree, overrides, FIELDS, "")


def change(config: Config, overrides: Sequence[str]) -> Config:
    """Return `config` with `overrides` applied. Raises `ConfigError` with a line for every mistake in `overrides`."""
    return _resolve(_plain(config), overrides, Path(CONFIG), "")


def save(config: Config, run: Path) -> None:
    """Write `config` as the configuration of the run in the folder `run`. Raises `RunError`."""
    with durable.naming(run / CONFIG, RunError):
        tree = {RUN_FOLDER: str(run.resolve()), **_plain(config)}
        durable.write(run / CONFIG, tomli_w.dumps(tree).encode())


def _hint(folder: Path) -> str:
    """Return the end of the error about a folder without a run: the runs in it, or in `runs` next to it."""
    for place in (folder, folder.parent / "runs" / folder.name):
        if (place / CONFIG).is_file():
            return f": is {place} meant?"
    names = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    if names:
        return f", but the runs {', '.join(names[:SHOWN])}{' and others' * (len(names) > SHOWN)}: name one of them"
    return "; `streamppo list` shows the runs of a folder"


def existing(run: Path) -> Path:
    """Return the absolute path of a run's folder. Raises `CheckpointError` for no run, pipes and sparse files."""
    run = run.resolve()
    if not (run / CONFIG).is_file():
        if (run / "config.json").is_file():
            raise CheckpointError(f"{run}: made by an earlier version of streamppo: only that version can continue it")
        raise CheckpointError(f"{run}: no run found{_hint(run)}")
    # The reading of a pipe may never end. A path that no longer exists was a temporary file of a run in progress.
    # Hidden files, such as an editor's lock, are never opened.
    shown = [path for path in run.iterdir() if not path.name.startswith(".")]
    if foreign := [path.name for path in shown if not (path.is_file() or path.is_dir()) and os.path.lexists(path)]:
        raise CheckpointError(f"{run / min(foreign)}: neither a file nor a folder; streamppo writes only these")
    # SQLite and tokenizers open files without a check for holes. Of files of weights only the headers are read.
    for path in (*run.iterdir(), *(run / "model").glob("*")):
        if path.suffix not in WEIGHTS and path.is_file() and durable.is_hollow(path):
            raise CheckpointError(f"{path}: {durable.HOLLOW}")
    return run


def show(config: Config) -> str:
    """Return `config` as TOML that `load` can read. Fields whose value is None are omitted."""
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
    """Return the configuration of `tree` with `overrides`. Errors name lines of `path`, whose content is `text`."""
    tree, parsed = with_kinds(tree), dotted.parse(overrides, as_kinds)
    sentences = dotted.apply(tree, parsed)
    _make_absolute(tree, Path())
    expanded = expand(tree)
    config, mistakes = convert(tree)
    names = [override.name for override in parsed]
    sentences += explain([*expanded.mistakes, *mistakes], path, text, names, expanded.short)
    if config is None or sentences:
        raise ConfigError("\n".join(sentences))
    return config


def _make_absolute(tree: Tree, folder: Path) -> None:
    """Make every relative path in `tree` that exists in `folder` absolute, in place."""
    absolute = folder.absolute()

    def change(path: str) -> str:
        candidate = os.path.normpath(absolute / path)
        return candidate if os.path.exists(candidate) else path

    _change(tree, change)


def _relocate(tree: Tree, former: str, run: Path) -> None:
    """Replace every path in `tree` by the path in the same place relative to the run, if the run moved it along.

    The root is no common folder of a run and its files.
    """

    def change(path: str) -> str:
        if not os.path.isabs(path) or os.path.commonpath([path, former]) == os.sep:
            return path
        candidate = os.path.normpath(run / os.path.relpath(path, former))
        return candidate if os.path.exists(candidate) else path

    if former != str(run):
        _change(tree, change)


def _change(tree: Tree, change: Callable[[str], str]) -> None:
    for section, names in PATHS.items():
        table = tree.get(section)
        if isinstance(table, dict):
            _walk(cast(Tree, table), names, change)


def _walk(table: Tree, names: tuple[str, ...], change: Callable[[str], str]) -> None:
    for name, value in table.items():
        if isinstance(value, dict):
            _walk(cast(Tree, value), names, change)
        elif isinstance(value, list) and name in names:
            table[name] = [_changed(item, change) for item in cast("list[object]", value)]
        # The name of a verifiers environment without ".toml" is an id, even if a folder of this name exists.
        elif name in names and not (name == "environment" and not str(cast(object, value)).endswith(".toml")):
            table[name] = _changed(cast(object, value), change)


def _changed(value: object, change: Callable[[str], str]) -> object:
    if not isinstance(value, str) or not value or "\0" in value:
        return value
    path, colon, attribute = value.partition(".py:")
    return change(path + ".py") + ":" + attribute if colon else change(value)


def explain(
    mistakes: Sequence[Mistake], path: Path, text: str, overridden: Sequence[str], short: Mapping[str, str]
) -> list[str]:
    """Return a line for each mistake, ordered by line of `path` with content `text`. `short` comes from `expand`."""
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
    """Return whether the override set the mistake's field, a table around it, or a field that contradicts it."""
    if dotted.covers(override, mistake.at):
        return True
    if mistake.broad and not mistake.at:
        # A sentence about several sections begins with the name of a field.
        return mistake.text.startswith(f"{override} ")
    return mistake.broad and dotted.covers(mistake.at, override)


def _as_written(mistake: Mistake, short: Mapping[str, str]) -> Mistake:
    for entry, written in short.items():
        if dotted.covers(entry, mistake.name):
            return mistake._replace(
                name=written + mistake.name.removeprefix(entry), at=written + mistake.at.removeprefix(entry)
            )
    return mistake


def _find_line(name: str, text: str) -> int | None:
    """Return the line that sets the dotted `name`, or else the line of the innermost table around `name`."""
    best: tuple[int, int] | None = None
    for number, full in _set(text):
        if full == name:
            return number
        if name.startswith(f"{full}.") and (best is None or len(full) >= best[0]):
            best = len(full), number
    return best and best[1]


def _set(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for every table header and every key."""
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([\w.\-]+)\s*\]", line):
            table = header[1]
            yield number, table
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            yield number, f"{table}.{key[1]}".lstrip(".")
