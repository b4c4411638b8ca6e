"""The columns of a batch in the archive: arrays of numbers, and the words that they index. Pure: no Ray, no disk.

    to_batch(*batch_columns(batch, record)) == batch

archive.py describes the columns. `verify` checks the columns of a file, because the file may come from anywhere.
"""

# pyright: standard

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamppo.types import Batch, Floats, Identity, TokenRecord, Trajectory, branches, flags, floats, ints, turns

Column: TypeAlias = NDArray[np.generic]
Finish: TypeAlias = Literal["stop", "length", "cut"]
FINISH: tuple[Finish, ...] = ("stop", "length", "cut")
FLAT = {"tokens": ints, "logprobs": floats, "versions": ints, "mask": flags}
"""Columns with one entry for each token of a completion."""
RECORD_COLUMNS = TokenRecord.__struct_fields__
RAGGED = {
    "token_rewards": floats,
    "candidates": ints,
    "candidate_counts": ints,
    "teacher_logprobs": floats,
    "routes": lambda column: np.frombuffer(column, dtype="<i2"),
    "branches": ints,
    "turns": ints,
}
"""Optional columns, which may have any number of entries per trajectory; each has a column NAME_offsets."""
EACH = ("token_rewards", "candidate_counts", "teacher_logprobs")
"""Columns in which a completion has either one entry for each token or none at all."""
IDENTITY = ("prompt", "sample", "attempt", "segment")
"""The columns with an identity's numbers; `segment` exists only with segments."""

TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*IDENTITY, "prefix", "task", "actor", "finish", "source"), ("int64",)),
    **dict.fromkeys(("tokens", "versions", "prompt_tokens"), ("int32",)),
    **dict.fromkeys(("candidates", "candidate_counts", "branches", "turns"), ("int32",)),
    **dict.fromkeys(("logprobs", "token_rewards", "teacher_logprobs"), ("float32",)),
    **dict.fromkeys(RECORD_COLUMNS, ("float32", "float16")),
    **dict.fromkeys(("reward", "components"), ("float64",)),
    "mask": ("bool",),
    "routes": ("int16", "uint8"),
    "route_bytes": ("int64",),
    "explanations": ("uint8",),
}
"""The allowed dtypes of every column, except offsets, which are int64."""
REQUIRED = frozenset((*IDENTITY[:3], "task", "actor", "finish", "reward", "prompt_tokens", *FLAT))


class Attributes(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A batch's versions, and the words to which numbers in its columns point."""

    version: int
    min_version: int
    tasks: list[str]
    actors: list[str]
    finishs: list[Finish]
    component_names: list[str] = []
    rows: list[int] = []
    sources: list[str] = []

    def words(self) -> dict[str, Sequence[str]]:
        named = {"task": self.tasks, "actor": self.actors, "finish": self.finishs}
        return {**named, "source": self.sources} if self.sources else named


def verify(columns: Mapping[str, Column], attributes: Attributes) -> None:
    """Raise `ValueError` or `LookupError` for columns that `batch_columns` never returns, such as bad offsets."""
    if missing := REQUIRED - columns.keys():
        raise ValueError(f"no column {min(missing)!r}")
    if ("segment" in columns) != ("prefix" in columns):
        raise ValueError("segments without the tokens before them")
    rows, offsets = len(columns["reward"]), {name for name in columns if name.endswith("offsets")}
    for name, column in columns.items():
        if column.dtype.name not in (("int64",) if name in offsets else TYPES.get(name, ())):
            raise ValueError(f"a column {name!r} of {column.dtype}")
        if column.ndim != (2 if name == "components" else 1):
            raise ValueError(f"a column {name!r} with the shape {column.shape}")
    tokens = _ends(columns, "offsets", rows, "tokens")
    _ends(columns, "prompt_offsets", rows, "prompt_tokens")
    for name in (*RAGGED, "explanations"):
        if name in columns:
            counts = _ends(columns, f"{name}_offsets", rows, name)
            if name in EACH and not ((counts == 0) | (counts == tokens)).all():
                raise ValueError(f"{name} of other tokens")
    flat = {name: len(columns["tokens"]) for name in (*FLAT, *RECORD_COLUMNS)}
    loose = {*flat, *offsets, "prompt_tokens", *RAGGED, "explanations"}
    for name, column in columns.items():
        if (name in flat and len(column) != flat[name]) or (name not in loose and len(column) != rows):
            raise ValueError(f"{len(column)} entries of {name!r}")
    _verify_values(columns, attributes, rows)


def _ends(columns: Mapping[str, Column], name: str, rows: int, of: str) -> Column:
    """Check the offsets `name` of the column `of`, and return the number of entries of each row."""
    ends = columns[name].astype(np.int64)
    lengths = np.diff(ends)
    if len(ends) != rows + 1 or ends[0] != 0 or ends[-1] != len(columns[of]) or lengths.min(initial=0) < 0:
        raise ValueError(f"{name} that do not cut {of!r} in {rows} parts")
    return lengths


def _verify_values(columns: Mapping[str, Column], attributes: Attributes, rows: int) -> None:
    if not rows or not np.logical_or.reduceat(columns["mask"], columns["offsets"][:-1].astype(np.int64)).all():
        raise ValueError("a trajectory without a token that the policy sampled")
    for name, words in attributes.words().items():
        if columns[name].min() < 0 or columns[name].max() >= len(words):
            raise ValueError(f"an index of {name!r} beyond its words")
    for name in ("tokens", "prompt_tokens", "candidates", "candidate_counts"):
        if name in columns and columns[name].min(initial=0) < 0:
            raise ValueError(f"a negative number in {name!r}")
    if not np.isfinite(columns["reward"]).all():
        raise ValueError("a reward that is not finite")
    widths = set(columns["route_bytes"].tolist()) if "route_bytes" in columns else {2}
    if not widths <= {1, 2} or ("routes" in columns and (columns["routes"].dtype == np.uint8) != (1 in widths)):
        raise ValueError(f"routes of {columns['routes'].dtype if 'routes' in columns else 'nothing'}")
    _verify_trees(columns)
    names = attributes.component_names
    if (names and columns["components"].shape[1] != len(names)) or ("components" in columns) != bool(names):
        raise ValueError("components without names")
    if attributes.rows and len(attributes.rows) != rows:
        raise ValueError(f"{len(attributes.rows)} numbers of rows")
    if not all(0 <= row < 2**31 for row in attributes.rows):
        raise ValueError("the number of a row that no batch has")


def _verify_trees(columns: Mapping[str, Column]) -> None:
    prompts = np.diff(columns["prompt_offsets"]).tolist()
    for name, flaw in (("branches", branches.flaw), ("turns", turns.flaw)):
        if name not in columns:
            continue
        ends, tokens = (pairwise(columns[offsets].tolist()) for offsets in (f"{name}_offsets", "offsets"))
        for (begin, end), prompt, span in zip(ends, prompts, tokens, strict=True):
            mask = columns["mask"][slice(*span)].astype(np.bool_)
            fault = flaw(columns[name][begin:end].tobytes(), prompt, mask) if end > begin else None
            if fault:
                raise ValueError(fault)


def record_columns(columns: Mapping[str, Column]) -> dict[str, list[Floats]]:
    """The learner's columns in a file, by name: for each completion an array with one number per token."""
    ends = columns["offsets"][1:-1].tolist()
    return {
        name: np.split(columns[name].astype(np.float32, copy=False), ends) for name in RECORD_COLUMNS if name in columns
    }


def batch_columns(batch: Batch, record: TokenRecord) -> tuple[dict[str, Column], Attributes]:
    """Convert a batch, with the learner's record of its tokens, to columns and attributes."""
    trajectories = batch.trajectories
    words = {
        "task": [trajectory.identity.task for trajectory in trajectories],
        "actor": [trajectory.actor for trajectory in trajectories],
    }
    if any(trajectory.source for trajectory in trajectories):
        words["source"] = [trajectory.source for trajectory in trajectories]
    vocabularies = {name: sorted(set(column)) for name, column in words.items()}
    vocabularies["finish"], words["finish"] = list(FINISH), [trajectory.finish for trajectory in trajectories]
    columns: dict[str, Column] = {
        "prompt": np.array([trajectory.identity.prompt for trajectory in trajectories]),
        "sample": np.array([trajectory.identity.sample for trajectory in trajectories]),
        "attempt": np.array([trajectory.identity.attempt for trajectory in trajectories]),
        "reward": np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64),
        "prompt_tokens": ints(b"".join(trajectory.prompt_tokens for trajectory in trajectories)),
        "prompt_offsets": _offsets([len(trajectory.prompt_tokens) // 4 for trajectory in trajectories]),
        "offsets": _offsets([trajectory.num_tokens for trajectory in trajectories]),
        **{
            name: read(b"".join(getattr(trajectory, name) for trajectory in trajectories))
            for name, read in FLAT.items()
        },
        **{name: np.array([vocabularies[name].index(word) for word in column]) for name, column in words.items()},
    }
    attributes = Attributes(
        version=batch.version,
        min_version=batch.min_version,
        rows=ints(batch.rows).tolist(),
        tasks=vocabularies["task"],
        actors=vocabularies["actor"],
        finishs=list(FINISH),
        sources=vocabularies.get("source", []),
    )
    is_narrow = any(trajectory.route_bytes == 1 for trajectory in trajectories)
    for name, read in (RAGGED | {"routes": _bytes} if is_narrow else RAGGED).items():
        if any(parts := [getattr(trajectory, name) for trajectory in trajectories]):
            columns[name] = read(b"".join(parts))
            columns[f"{name}_offsets"] = _offsets([read(part).size for part in parts])
    if any(trajectory.route_bytes != 2 for trajectory in trajectories):
        columns["route_bytes"] = np.array([trajectory.route_bytes for trajectory in trajectories])
    if any(trajectory.finish == "cut" or trajectory.identity.segment for trajectory in trajectories):
        columns["segment"] = np.array([trajectory.identity.segment for trajectory in trajectories])
        columns["prefix"] = np.array([trajectory.prefix for trajectory in trajectories])
    for name in RECORD_COLUMNS:
        if numbers := getattr(record, name):
            columns[name] = floats(numbers)
            assert len(columns[name]) == len(columns["tokens"]), "one number for each token"
    if any(texts := [trajectory.explanation.encode() for trajectory in trajectories]):
        columns["explanations"] = _bytes(b"".join(texts))
        columns["explanations_offsets"] = _offsets([len(text) for text in texts])
    if names := sorted({name for trajectory in trajectories for name in trajectory.components}):
        columns["components"] = np.array(
            [[trajectory.components.get(name, np.nan) for name in names] for trajectory in trajectories]
        )
        attributes.component_names = names
    return columns, attributes


def _bytes(column: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(column, dtype=np.uint8)


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def decode_words(column: Column, known: Sequence[str]) -> list[str]:
    """Look up the words at the indices in `column`."""
    return [known[int(number)] for number in column]


def explanations(columns: Mapping[str, Column]) -> list[str]:
    """The explanation of each trajectory; "" if it has none."""
    if "explanations" not in columns:
        return [""] * (len(columns["offsets"]) - 1)
    text, ends = columns["explanations"].tobytes(), columns["explanations_offsets"].tolist()
    return [text[begin:end].decode(errors="replace") for begin, end in pairwise(ends)]


def to_batch(columns: Mapping[str, Column], attributes: Attributes) -> Batch:
    """Make the batch from columns that `verify` has accepted."""
    at, prompt_at = columns["offsets"].tolist(), columns["prompt_offsets"].tolist()
    words = {name: decode_words(columns[name], known) for name, known in attributes.words().items()}
    ragged_at = {name: columns[f"{name}_offsets"].tolist() for name in RAGGED if name in columns}
    names = attributes.component_names
    components = columns["components"].tolist() if "components" in columns else [()] * len(columns["reward"])
    texts = explanations(columns)
    trajectories: list[Trajectory] = []
    for row, reward in enumerate(columns["reward"].tolist()):
        tokens = slice(at[row], at[row + 1])
        number = {name: int(columns[name][row]) for name in IDENTITY if name in columns}
        values = zip(names, components[row], strict=True)
        ragged = {name: columns[name][ends[row] : ends[row + 1]].tobytes() for name, ends in ragged_at.items()}
        trajectories.append(
            Trajectory(
                identity=Identity(task=words["task"][row], **number),
                actor=words["actor"][row],
                prompt_tokens=columns["prompt_tokens"][prompt_at[row] : prompt_at[row + 1]].tobytes(),
                finish=words["finish"][row],  # pyright: ignore[reportArgumentType]
                reward=reward,
                components={name: value for name, value in values if not math.isnan(value)},
                prefix=int(columns["prefix"][row]) if "prefix" in columns else 0,
                route_bytes=int(columns["route_bytes"][row]) if "route_bytes" in columns else 2,
                explanation=texts[row],
                source=words["source"][row] if "source" in words else "",
                **{name: columns[name][tokens].tobytes() for name in FLAT},  # pyright: ignore[reportArgumentType]
                **ragged,
            )
        )
    return Batch(
        version=attributes.version,
        min_version=attributes.min_version,
        rows=np.array(attributes.rows, dtype="<i4").tobytes(),
        trajectories=tuple(trajectories),
    )
