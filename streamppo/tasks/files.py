"""The files of a split in a folder of data: named after it, or in a folder named after it.

of the split train    train.jsonl, train-00000-of-00002.parquet, train/anything.parquet, main/train.jsonl.gz
of none               .cache/train.jsonl, and all that may be meant otherwise: train-old.jsonl, test/train.jsonl
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from streamppo import durable
from streamppo.errors import TaskError

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")
UNREAD = re.compile(r"\.(csv|tsv|json|ndjson|feather|(jsonl|csv|json|parquet)\.\w+)$")
"""Endings of data that are not read."""
SHARD = r"(?:[-_.]\d+)?(?:[-_]of[-_]\d+)?(?:[-_.][0-9a-f]{8,})?"
"""The rest of a name such as train-00000-of-00002-a09b74b3ef9c3b56."""
SPLITS = frozenset({"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"})


class SplitFiles(NamedTuple):
    """The files of a split, and names of others that may be meant to be of it."""

    of_split: list[Path]
    doubtful: list[str]


def find(folder: Path, split: str) -> SplitFiles:
    """Find the files of `split`. Raises `TaskError` without any, and for one in a form that is not read."""
    if is_saved_dataset(folder):
        try:
            entries = json.loads(durable.read(folder / "state.json"))["_data_files"]
            return SplitFiles([folder / entry["filename"] for entry in entries], [])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise TaskError(f"{folder / 'state.json'}: not as `save_to_disk` writes it: {error}") from error
    seen = list(_visible_files(folder))
    data = [name for name in seen if ending(name)]
    others = [name for name in seen if not ending(name) and UNREAD.search(name.name)]
    if unread := [str(name) for name in others if _is_named(_stem(name), split)]:
        raise TaskError(
            f"{folder}: {', '.join(unread)} of the split {split!r} would be left out: make jsonl or parquet of it, "
            "move it away, or name the file that is meant as `data`"
        )
    of_split = [name for name in data if _is_of(name, split)]
    if not of_split:
        names = ", ".join(map(str, data)) or "none"
        raise TaskError(
            f"{folder}: no file of the split {split!r}; jsonl, parquet and arrow files in it: {names}; "
            "a single file can be named as `data`"
        )
    doubtful = [str(name) for name in data if name not in of_split and _mentions(name, split)]
    return SplitFiles([folder / name for name in of_split], doubtful)


def is_saved_dataset(folder: Path) -> bool:
    """Tell if the folder was made of one split by `save_to_disk`."""
    return (folder / "state.json").is_file()


def ending(path: Path) -> str:
    """Return the ending of a file that is read, "" for others."""
    return next((one for one in ENDINGS if path.name.endswith(one)), "")


def _visible_files(folder: Path) -> Iterator[Path]:
    """Yield the relative paths of all files that are not hidden, in order."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            yield name


def _stem(name: Path) -> str:
    """Return the name of a file without its ending."""
    known = ending(name) or (found[0] if (found := UNREAD.search(name.name)) else "")
    return name.name.removesuffix(known)


def _is_named(stem: str, split: str) -> bool:
    return re.fullmatch(re.escape(split) + SHARD, stem) is not None


def _is_of(name: Path, split: str) -> bool:
    """Tell if a file is of the split and of no other."""
    named = {part for part in name.parts[:-1] if part in SPLITS or part == split}
    named |= {one for one in SPLITS | {split} if _is_named(_stem(name), one)}
    return named == {split}


def _mentions(name: Path, split: str) -> bool:
    """Tell if the split's name begins a part of the path."""
    return any(re.match(re.escape(split) + r"(?![a-z0-9])", part) for part in name.parts)
