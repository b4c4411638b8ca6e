"""Finds the files of a split in a data folder: files with the name of the split, or in a folder with its name.

of the split train    train.jsonl, train-00000-of-00002.parquet, train/anything.parquet, main/train.jsonl.gz
of no split           .cache/train.jsonl, and ambiguous names: train-old.jsonl, test/train.jsonl
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from streamppo import durable
from streamppo.errors import TaskError

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow", ".csv", ".csv.gz", ".tsv", ".tsv.gz")
DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Files, other than those of rows, that `datasets` writes."""
UNSUPPORTED = re.compile(r"\.(ndjson|feather|(jsonl|csv|tsv|json|parquet)\.\w+)$")
SHARD = r"(?:[-_.]\d+)?(?:[-_]of[-_]\d+)?(?:[-_.][0-9a-f]{8,})?"
"""The shard suffix of a name such as train-00000-of-00002-a09b74b3ef9c3b56."""
SPLITS = frozenset({"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"})


class SplitFiles(NamedTuple):
    """The files of a split, and the names of other files whose paths mention the split."""

    of_split: list[Path]
    doubtful: list[str]


def find(folder: Path, split: str) -> SplitFiles:
    """Find the files of `split`. Raises `TaskError` if there are none, or for an unsupported or ambiguous format."""
    if is_saved_dataset(folder / split):
        # A saved folder may have other files too, such as the cache of `map`: state.json lists the data files.
        folder /= split
    if is_saved_dataset(folder):
        try:
            entries = json.loads(durable.read(folder / "state.json"))["_data_files"]
            return SplitFiles([folder / entry["filename"] for entry in entries], [])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise TaskError(f"{folder / 'state.json'}: not as `save_to_disk` writes it: {error}") from error
    visible = list(_visible_files(folder))
    data = [name for name in visible if ending(name)]
    others = [name for name in visible if not ending(name) and UNSUPPORTED.search(name.name)]
    if unsupported := [str(name) for name in others if _is_named(_stem(name), split)]:
        raise TaskError(
            f"{folder}: {', '.join(unsupported)} of the split {split!r} cannot be read: convert it to jsonl, csv or "
            "parquet, move it away, or name another file as `data`"
        )
    of_split = [name for name in data if _belongs_to(name, split)]
    if not of_split:
        names = ", ".join(map(str, data)) or "none"
        raise TaskError(
            f"{folder}: no file of the split {split!r}; jsonl, json, csv, parquet and arrow files in it: {names}; "
            "a single file can be named as `data`"
        )
    by_stem: dict[Path, list[str]] = defaultdict(list)
    for name in of_split:
        by_stem[name.with_name(_stem(name))].append(str(name))
    if same := next((names for names in by_stem.values() if len(names) > 1), None):
        raise TaskError(
            f"{folder}: {' and '.join(same)} differ only in their endings, so their rows may be the same: move one "
            "away, or name one of them as `data`"
        )
    mention = re.compile(re.escape(split) + r"(?![a-z0-9])")
    doubtful = [str(name) for name in data if name not in of_split and any(map(mention.match, name.parts))]
    return SplitFiles([folder / name for name in of_split], doubtful)


def is_saved_dataset(folder: Path) -> bool:
    """Return True if `save_to_disk` of a single split wrote the folder."""
    return (folder / "state.json").is_file()


def ending(path: Path) -> str:
    """Return the ending of a supported file, "" for other files and for descriptions of data sets."""
    if path.name in DESCRIPTIONS:
        return ""
    return next((suffix for suffix in ENDINGS if path.name.endswith(suffix)), "")


def _visible_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            yield name


def _stem(name: Path) -> str:
    known = ending(name) or (match[0] if (match := UNSUPPORTED.search(name.name)) else "")
    return name.name.removesuffix(known)


def _is_named(stem: str, split: str) -> bool:
    return re.fullmatch(re.escape(split) + SHARD, stem) is not None


def _belongs_to(name: Path, split: str) -> bool:
    """Return True if a file belongs to the split and to no other split."""
    named = {part for part in name.parts[:-1] if part in SPLITS or part == split}
    named |= {candidate for candidate in SPLITS | {split} if _is_named(_stem(name), candidate)}
    return named == {split}
