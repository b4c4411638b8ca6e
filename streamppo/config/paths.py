"""Makes the relative paths of a configuration absolute.

A path in a file is resolved in the file's folder, or the folder of a link's target, or else in the current folder. A
path in an override is resolved in the current folder. A run stores absolute paths, so it can be resumed from any
folder. Paths below the parent folder of the run are stored relative to the run, so the parent folder can be moved with
all its files.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from streamppo.config.overrides import Tree

FIELDS: Mapping[str, tuple[str, ...]] = {
    "model": ("path",),
    "task": ("data", "evaluation", "environment"),
    "reward": ("function", "path", "sandbox", "environment"),
    "environment": ("name", "agent", "command", "files", "environment"),
    "algorithm": ("function", "model", "pretrain"),
    "rollout": ("folder", "limit"),
}
"""The fields that may contain a path, at any depth, by section."""


def make_absolute(tree: Tree, folder: Path) -> None:
    """Make every relative path in `tree` that exists in `folder` absolute, in place."""
    absolute = folder.absolute()

    def change(path: str) -> str:
        candidate = os.path.normpath(absolute / path)
        return candidate if os.path.exists(candidate) else path

    _change(tree, change)


def make_relative(tree: Tree, run: Path) -> None:
    """Make the paths in `tree` to files in the run's folder or its parent relative to the run's folder, in place."""
    absolute = run.absolute()

    def change(path: str) -> str:
        return os.path.relpath(path, absolute) if Path(path).is_relative_to(absolute.parent) else path

    _change(tree, change)


def _change(tree: Tree, change: Callable[[str], str]) -> None:
    for section, names in FIELDS.items():
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
