"""The durable record of what was trained on: one zarr group for each update, each a zip file of its own.

runs/NAME/archive/00000042.zarr.zip            the batch of version 42, exactly
runs/NAME/archive/00000042.1-of-4.zarr.zip     where the queue has shards, the part of it that one of them had

    zarr.open_group(zarr.storage.ZipStore("00000042.zarr.zip", mode="r"))        is all that it takes to read one

B trajectories lie one after another in flat columns: those of trajectory i are `offsets[i] : offsets[i + 1]`, its
prompt is `prompt_offsets[i] : prompt_offsets[i + 1]`. If rewards stand on single tokens there is a flat column
`token_rewards` with offsets of its own. If top-p or top-k cut the distribution, `candidates` are the tokens that were
left of it, and `candidate_counts` says how many each token of a completion has (0: the whole vocabulary), both flat,
with offsets of their own. So have the `teacher_logprobs` of a teacher that is a server, and the `routes` of a mixture
of experts. If rewards have components a table of them [B, components], NaN if a trajectory has none of a name. If
rewards are explained, `explanations` is their text in UTF-8, flat, with offsets of its own. The learner's numbers of
each token, as the update began, lie beside it: `values`, the critic's expectation before it was sampled, if there is a
critic; `proximal_logprobs`, its log-prob by the learner's own policy, if a pass gave it; `advantages`. A file is
complete when it has its name; it counts once the journal holds its SHA-256.

The attribute `rows` of a part has the numbers of its trajectories in the batch; the parts are read as one.

With segments, `segment` is a trajectory's number in its completion, and `prefix` says how many of the last tokens of
its prompt are of the segments before it.

It is written under a name of its writer, and gets its own within the transaction that records it: a queue that was
given up for dead, and still writes, comes too late for that. The journal also knows the range of prompts of each file,
so that a prompt is found without opening all of them.
"""

# zarr and pyarrow leave parts of their signatures untyped.
# pyright: standard

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from uuid import uuid4

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamppo import durable
from streamppo.errors import JournalError
from streamppo.process import phase
from streamppo.queue import parts, zarr_zip
from streamppo.queue.journal import Journal
from streamppo.queue.records import Archived, Made
from streamppo.types import Batch, Crossing, Floats, Identity, Learned, Trajectory, flags, floats, ints, routes

if TYPE_CHECKING:
    import pyarrow

Column: TypeAlias = NDArray[np.generic]
FINISH = ("stop", "length", "cut")
FLAT = {"tokens": ints, "logprobs": floats, "versions": ints, "mask": flags}
"""Columns with one entry for each token of a completion."""
LEARNED = Learned.__struct_fields__
"""Columns that the learner adds to them."""
RAGGED = {
    "token_rewards": floats,
    "candidates": ints,
    "candidate_counts": ints,
    "teacher_logprobs": floats,
    "routes": routes,
}
"""Columns that only some trajectories have, or with any number of entries; their offsets lie beside them."""


IDENTITY = ("prompt", "sample", "attempt", "segment")
"""Columns of an identity's numbers; the last one only with segments."""


class Attributes(msgspec.Struct, omit_defaults=True):
    """A batch's versions, and the words that columns of numbers stand for."""

    version: int
    min_version: int
    tasks: list[str]
    actors: list[str]
    finishs: list[str]
    component_names: list[str] = []
    rows: list[int] = []

    def words(self) -> dict[str, list[str]]:
        """The words of each column of words."""
        return {"task": self.tasks, "actor": self.actors, "finish": self.finishs}


class Written(Crossing, frozen=True):
    """A file without a name, of a batch or of a part of one, its SHA-256, and its first and its last prompt."""

    path: str
    sha256: str
    first_prompt: int
    last_prompt: int


class Archive:
    """The batches of one run. `checksums` are the SHA-256 of the files of each that count, by version."""

    def __init__(self, folder: Path, checksums: Mapping[int, tuple[str, ...]]) -> None:
        self.folder = folder
        self.checksums = dict(checksums)
        self._asides: dict[int, list[Path]] = {}

    def versions(self) -> list[int]:
        """The versions whose batch is here, in order."""
        return sorted(self.checksums)

    def write(self, batch: Batch, learned: Learned | None = None) -> Archived:
        """Make `batch` durable, but for its name, which `settle` gives it; returns the journal's record of the file.

        `learned` has one number for each token of its completions. Raises `JournalError` if the disk refuses.
        """
        return self.gather(batch.version, [write(self.folder, batch, learned or Learned())])

    def gather(self, version: int, written: Sequence[Written]) -> Archived:
        """Note the files of all parts of a batch, which shards have written; returns the journal's record of them."""
        self._asides[version] = [Path(one.path) for one in written]
        return Archived(
            files=tuple(one.sha256 for one in written),
            first_prompt=min(one.first_prompt for one in written),
            last_prompt=max(one.last_prompt for one in written),
        )

    def settle(self, made: Made) -> None:
        """Give the batch that made a version its name, if there is one; it counts from here on.

        To be called within the transaction that records it. Raises `JournalError` if the disk refuses.
        """
        if made.archived is None:
            return
        version, files = made.version - 1, made.archived.files
        paths = self.paths(version, len(files))
        for aside, path in zip(self._asides.pop(version), paths, strict=True):
            with durable.naming(path, JournalError):
                durable.rename(aside, path)
        self.checksums[version] = files

    def sweep(self) -> None:
        """Delete files without a name, left by writers that died, and those before the first that is kept.

        Only for the writer that has fenced the journal.
        """
        first = min(self.checksums, default=0)
        with durable.naming(self.folder, JournalError):
            for path in self.folder.glob("*"):
                if path.name.endswith(durable.ASIDE) or int(path.name.partition(".")[0]) < first:
                    path.unlink(missing_ok=True)

    def drop(self, before: int) -> None:
        """Delete the batches of versions below `before`; the journal has forgotten them. Raises `JournalError`."""
        for version in [one for one in self.checksums if one < before]:
            for path in self.paths(version, len(self.checksums[version])):
                with durable.naming(path, JournalError):
                    path.unlink(missing_ok=True)
            del self.checksums[version]

    def columns(self, version: int) -> dict[str, Column]:
        """The columns of a batch as numpy arrays. Raises `JournalError` if it is missing or damaged."""
        return self._read(version)[0]

    def batch(self, version: int) -> Batch:
        """The very batch that was trained on. Raises `JournalError` if it is missing or damaged."""
        columns, attributes = self._read(version)
        return _batch(columns, attributes)

    def batch_and_learned(self, version: int) -> tuple[Batch, dict[str, list[Floats]]]:
        """The batch and its `learned` numbers, in one reading. Raises `JournalError` if it is missing or damaged."""
        columns, attributes = self._read(version)
        return _batch(columns, attributes), learned(columns)

    def table(self, version: int) -> "pyarrow.Table":
        """The batch as a pyarrow Table with one row for each trajectory; `.to_pandas()` makes it a frame."""
        import pyarrow

        columns, attributes = self._read(version)
        explanations = _explanations(columns)
        at, prompt_at = columns.pop("offsets"), columns.pop("prompt_offsets")
        names = [name for name in (*FLAT, *LEARNED) if name in columns]
        flat = {name: pyarrow.ListArray.from_arrays(at.astype(np.int32), columns.pop(name)) for name in names}
        flat["prompt_tokens"] = pyarrow.ListArray.from_arrays(prompt_at.astype(np.int32), columns.pop("prompt_tokens"))
        for name in [name for name in RAGGED if name in columns]:
            ends = columns.pop(f"{name}_offsets").astype(np.int32)
            flat[name] = pyarrow.ListArray.from_arrays(ends, columns.pop(name))
        for name in [name for name in columns if name.startswith("explanations")]:
            del columns[name]
        if "components" in columns:
            columns |= dict(zip(attributes.component_names, columns.pop("components").T, strict=True))
        words = {name: _spelled(columns.pop(name), known) for name, known in attributes.words().items()}
        told = {"explanation": explanations} if any(explanations) else {}
        return pyarrow.table({**columns, **words, **told, **flat})

    def path(self, version: int) -> Path:
        """The file of the batch of `version`, if it is the only one."""
        return _path(self.folder, version)

    def paths(self, version: int, count: int) -> list[Path]:
        """The `count` files of the batch of `version`."""
        parts = [f".{number + 1}-of-{count}" for number in range(count)] if count > 1 else [""]
        return [_path(self.folder, version, part) for part in parts]

    def _read(self, version: int) -> tuple[dict[str, Column], Attributes]:
        path, expected = self.path(version), self.checksums.get(version)
        if expected is None:
            if version < min(self.checksums, default=0):
                raise JournalError(f"{path}: not kept: the archive begins with version {min(self.checksums)}")
            raise JournalError(f"{path}: no batch of version {version} was recorded")
        paths = self.paths(version, len(expected))
        found = [_read(path, sha256) for path, sha256 in zip(paths, expected, strict=True)]
        return found[0] if len(found) == 1 and not found[0][1].rows else _merged(found)


def open(run: Path) -> Archive:
    """The archive of the run in the folder `run`. Raises `JournalError` if it has none."""
    journal = Journal.of(run)
    versions = journal.versions().values()
    journal.close()
    return Archive(run / "archive", checksums(versions))


def learned(columns: Mapping[str, Column]) -> dict[str, list[Floats]]:
    """The learner's numbers that are kept, by their names: for every completion, one for each of its tokens."""
    ends = columns["offsets"][1:-1].tolist()
    return {name: np.split(columns[name].astype(np.float32, copy=False), ends) for name in LEARNED if name in columns}


def checksums(versions: Iterable[Made]) -> dict[int, tuple[str, ...]]:
    """The SHA-256 of the files of each archived batch, by the batch's version."""
    return {made.version - 1: made.archived.files for made in versions if made.archived}


@phase("archive")
def write(folder: Path, batch: Batch, learned: Learned) -> Written:
    """Make a batch, or a part of one, durable, but for its name; `learned` has a number for each of its tokens.

    Raises `JournalError` if the disk refuses.
    """
    path = _path(folder, batch.version)
    aside = durable.aside(path.with_name(f"{path.name}.{uuid4().hex}"))
    with durable.naming(path, JournalError):
        durable.folder(folder)
        columns, attributes = _columns(batch, learned)
        content = zarr_zip.packed(columns, msgspec.to_builtins(attributes))
        aside.write_bytes(content)
        durable.flush(aside)
    sha256 = hashlib.sha256(content).hexdigest()
    prompts = [trajectory.identity.prompt for trajectory in batch.trajectories]
    return Written(path=str(aside), sha256=sha256, first_prompt=min(prompts), last_prompt=max(prompts))


def _path(folder: Path, version: int, part: str = "") -> Path:
    return folder / f"{version:08d}{part}.zarr.zip"


def _read(path: Path, expected: str) -> tuple[dict[str, Column], Attributes]:
    """The columns and attributes of a file. Raises `JournalError` if it is missing or damaged."""
    try:
        found = durable.sha256(path)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error}") from error
    if found != expected:
        raise JournalError(f"{path}: damaged: its SHA-256 is not the one that was recorded")
    # A quarter of a second to import, which a new run needs in no process.
    import zarr
    from zarr.storage import ZipStore

    with ZipStore(path, mode="r") as store:
        group = zarr.open_group(store, mode="r")
        columns = {name: np.asarray(array[:]) for name, array in group.arrays()}
        return columns, msgspec.convert(dict(group.attrs), Attributes)


def _merged(found: Sequence[tuple[dict[str, Column], Attributes]]) -> tuple[dict[str, Column], Attributes]:
    """The columns of a whole batch, of those of its parts."""
    batch = parts.merge([_batch(columns, attributes) for columns, attributes in found])
    by_row: dict[str, dict[int, Floats]] = {}
    for columns, attributes in found:
        for name, numbers in learned(columns).items():
            by_row.setdefault(name, {}).update(zip(attributes.rows, numbers, strict=True))
    flat = {name: np.concatenate([rows[row] for row in sorted(rows)]).tobytes() for name, rows in by_row.items()}
    return _columns(batch, Learned(**flat))


def _columns(batch: Batch, learned: Learned) -> tuple[dict[str, Column], Attributes]:
    trajectories = batch.trajectories
    words = {"task": [one.identity.task for one in trajectories], "actor": [one.actor for one in trajectories]}
    known = {name: sorted(set(column)) for name, column in words.items()}
    known["finish"], words["finish"] = list(FINISH), [one.finish for one in trajectories]
    columns: dict[str, Column] = {
        "prompt": np.array([one.identity.prompt for one in trajectories]),
        "sample": np.array([one.identity.sample for one in trajectories]),
        "attempt": np.array([one.identity.attempt for one in trajectories]),
        "reward": np.array([one.reward for one in trajectories], dtype=np.float64),
        "prompt_tokens": ints(b"".join(one.prompt_tokens for one in trajectories)),
        "prompt_offsets": _offsets([len(one.prompt_tokens) // 4 for one in trajectories]),
        "offsets": _offsets([one.num_tokens for one in trajectories]),
        **{name: read(b"".join(getattr(one, name) for one in trajectories)) for name, read in FLAT.items()},
        **{name: np.array([known[name].index(word) for word in column]) for name, column in words.items()},
    }
    attributes = Attributes(
        version=batch.version,
        min_version=batch.min_version,
        rows=ints(batch.rows).tolist(),
        **{f"{name}s": found for name, found in known.items()},
    )
    for name, read in RAGGED.items():
        if any(parts := [getattr(one, name) for one in trajectories]):
            columns[name] = read(b"".join(parts))
            columns[f"{name}_offsets"] = _offsets([read(part).size for part in parts])
    if any(one.finish == "cut" or one.identity.segment for one in trajectories):
        columns["segment"] = np.array([one.identity.segment for one in trajectories])
        columns["prefix"] = np.array([one.prefix for one in trajectories])
    for name in LEARNED:
        if found := getattr(learned, name):
            columns[name] = floats(found)
            assert len(columns[name]) == len(columns["tokens"]), "one number for each token"
    if any(texts := [one.explanation.encode() for one in trajectories]):
        columns["explanations"] = np.frombuffer(b"".join(texts), dtype=np.uint8)
        columns["explanations_offsets"] = _offsets([len(text) for text in texts])
    if names := sorted({name for one in trajectories for name in one.components}):
        columns["components"] = np.array([[one.components.get(name, np.nan) for name in names] for one in trajectories])
        attributes.component_names = names
    if not all(one.versions_known for one in trajectories):
        columns["versions_known"] = np.array([one.versions_known for one in trajectories])
    return columns, attributes


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _present(names: Sequence[str], numbers: Sequence[float]) -> dict[str, float]:
    return {name: number for name, number in zip(names, numbers, strict=True) if not math.isnan(number)}


def _spelled(column: Column, known: Sequence[str]) -> list[str]:
    return [known[int(number)] for number in column]


def _explanations(columns: Mapping[str, Column]) -> list[str]:
    """The text of each trajectory, empty where there is none."""
    if "explanations" not in columns:
        return [""] * (len(columns["offsets"]) - 1)
    text, ends = columns["explanations"].tobytes(), columns["explanations_offsets"].tolist()
    return [text[begin:end].decode() for begin, end in pairwise(ends)]


def _batch(columns: Mapping[str, Column], attributes: Attributes) -> Batch:
    at, prompt_at = columns["offsets"].tolist(), columns["prompt_offsets"].tolist()
    words = {name: _spelled(columns[name], known) for name, known in attributes.words().items()}
    ragged_at = {name: columns[f"{name}_offsets"].tolist() for name in RAGGED if name in columns}
    components = columns["components"].tolist() if "components" in columns else None
    known, explanations = columns.get("versions_known"), _explanations(columns)
    trajectories: list[Trajectory] = []
    for row, reward in enumerate(columns["reward"].tolist()):
        tokens = slice(at[row], at[row + 1])
        number = {name: int(columns[name][row]) for name in IDENTITY if name in columns}
        ragged = {name: columns[name][ends[row] : ends[row + 1]].tobytes() for name, ends in ragged_at.items()}
        trajectories.append(
            Trajectory(
                identity=Identity(task=words["task"][row], **number),
                actor=words["actor"][row],
                prompt_tokens=columns["prompt_tokens"][prompt_at[row] : prompt_at[row + 1]].tobytes(),
                finish=words["finish"][row],  # pyright: ignore[reportArgumentType]
                reward=reward,
                components={} if components is None else _present(attributes.component_names, components[row]),
                prefix=int(columns["prefix"][row]) if "prefix" in columns else 0,
                explanation=explanations[row],
                versions_known=known is None or bool(known[row]),
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
