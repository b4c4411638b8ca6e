"""Resolves a configuration's paths: a file's in its folder, then in the current folder; overrides only in the latter.

A run stores absolute paths, so that it can be resumed from any folder. Paths into the run or its parent folder are
stored relative to the run: it can be resumed after a move together with its neighbours.
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
"""By section, the fields at any depth that may name a file or folder."""


def make_absolute(tree: Tree, folder: Path) -> None:
    """Make every relative path that exists in `folder` absolute, in place. Others are unchanged."""
    absolute = folder.absolute()

    def change(path: str) -> str:
        candidate = os.path.normpath(absolute / path)
        return candidate if os.path.exists(candidate) else path

    _change(tree, change)


def make_relative(tree: Tree, run: Path) -> None:
    """Make every path into the run folder `run` or its parent relative to `run`, in place."""
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
        # An environment of verifiers is a file or an id, also if a folder of that name exists.
        elif name in names and not (name == "environment" and not str(cast(object, value)).endswith(".toml")):
            table[name] = _changed(cast(object, value), change)


def _changed(value: object, change: Callable[[str], str]) -> object:
    if not isinstance(value, str) or not value or "\0" in value:
        return value
    path, colon, attribute = value.partition(".py:")
    return change(path + ".py") + ":" + attribute if colon else change(value)
