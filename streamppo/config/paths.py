"""Paths in a configuration: those of a file are looked for beside it, then in the current folder; overrides there.

A run keeps absolute paths, so that it is resumed from anywhere. Paths that lead into the run, or beside it, are
relative to it, so that a run that was moved, with its neighbours, is resumed too.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from streamppo.config.overrides import Tree

FIELDS: Mapping[str, tuple[str, ...]] = {
    "model": ("path",),
    "task": ("data", "evaluation"),
    "reward": ("function", "path"),
    "environment": ("name", "agent", "command", "files"),
    "algorithm": ("function", "model", "pretrain"),
    "rollout": ("folder", "limit"),
}
"""By section, the fields at any depth of it that may name a file or a folder."""


def anchor(tree: Tree, folder: Path) -> None:
    """Make every relative path that leads to something in `folder` absolute, in place. Others stay as they are."""
    absolute = folder.absolute()

    def change(path: str) -> str:
        found = os.path.normpath(absolute / path)
        return found if os.path.exists(found) else path

    _change(tree, change)


def relate(tree: Tree, run: Path) -> None:
    """Make every path that leads into the folder of the run `run`, or beside it, relative to it, in place."""
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
            table[name] = [_changed(one, change) for one in cast("list[object]", value)]
        elif name in names:
            table[name] = _changed(cast(object, value), change)


def _changed(value: object, change: Callable[[str], str]) -> object:
    if not isinstance(value, str) or not value or "\0" in value:
        return value
    path, colon, attribute = value.partition(".py:")
    return change(path + ".py") + ":" + attribute if colon else change(value)
