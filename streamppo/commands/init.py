"""Begin a project: a configuration, a reward, data and a README that run at once on a CPU.

project/     the files as they are written; NAME in them becomes the project's name
"""

import json
import re
from collections.abc import Sequence
from importlib import resources
from itertools import product
from pathlib import Path

import numpy as np

from streamppo import durable
from streamppo.commands.echo import echo
from streamppo.errors import ConfigError, RunError

LETTERS, LENGTH = "abcdefgh", 4
"""The problems are all texts of so many of these letters."""
HELD_OUT = 256
FILES = ("run.toml", "rewards.py", "README.md")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def init(folder: Path) -> int:
    """Make the project in `folder`, which is new or empty; its name is the folder's.

    Raises `ConfigError` for a folder that has files and for a name that no run can have, and `RunError` if it cannot be
    written.
    """
    name = folder.resolve().name
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a project: take letters, digits, dots, dashes and underscores")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: something is there already; a project begins in a new folder")
    with durable.naming(folder, RunError):
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for file in FILES:
            text = (resources.files("streamppo.commands") / "project" / file).read_text()
            (folder / file).write_text(text.replace("NAME", name))
        rows = _rows()
        _write(folder / "data" / "held_out.jsonl", rows[:HELD_OUT])
        _write(folder / "data" / "train.jsonl", rows[HELD_OUT:])
    echo(f"{folder}: {', '.join(FILES)} and data/ are there")
    echo(f"begin with: cd {folder} && streamppo run run.toml")
    return 0


def _rows() -> list[dict[str, str]]:
    """Every problem with its answer, always in the same order."""
    texts = ["".join(letters) for letters in product(LETTERS, repeat=LENGTH)]
    shuffled = (texts[int(n)] for n in np.random.default_rng(0).permutation(len(texts)))
    return [{"prompt": f"{text}>", "answer": "".join(sorted(text))} for text in shuffled]


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
