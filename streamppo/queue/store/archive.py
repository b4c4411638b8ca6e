"""The durable record of what was trained on: one zarr group for each update, each a zip file of its own.

runs/NAME/archive/00000042.zarr.zip            the batch of version 42, exactly
runs/NAME/archive/00000042.1-of-4.zarr.zip     where the queue has shards, the part of it that one of them had

    zarr.open_group(zarr.storage.ZipStore("00000042.zarr.zip", mode="r"))        is all that it takes to read one

B trajectories lie one after another in flat columns: those of trajectory i are `offsets[i] : offsets[i + 1]`, its
prompt is `prompt_offsets[i] : prompt_offsets[i + 1]`. If rewards stand on single tokens there is a flat column
`token_rewards` with offsets of its own. If top-p or top-k cut the distribution, `candidates` are the tokens that were
left of it, and `candidate_counts` says how many each token of a completion has (0: the whole vocabulary), both flat,
with offsets of their own. So have the `teacher_logprobs` of a teacher that is a server, the `routes` of a mixture of
experts, the `branches` of trajectories whose tokens are a tree, pairs (start, parent) of types/branches.py, and the
`turns` of agents' runs, (start, end, reused, delivered) of types/turns.py. If
rewards have components a table of them [B, components], NaN if a trajectory has none of a name. If rewards are
explained, `explanations` is their text in UTF-8, flat, with offsets of its own. The learner's numbers of each token, as
the update began, lie beside it: `values`, the critic's expectation before it was sampled, if there is a critic;
`proximal_logprobs`, its log-prob by the learner's own policy, if a pass gave it; `advantages`. A file is complete when
it has its name; it counts once the journal holds its SHA-256.

The attribute `rows` of a part has the numbers of its trajectories in the batch; the parts are read as one.

With segments, `segment` is a trajectory's number in its completion, and `prefix` says how many of the last tokens of
its prompt are of the segments before it.

It is written under a name of its writer, and gets its own within the transaction that records it: a queue that was
given up for dead, and still writes, comes too late for that. The journal also knows the range of prompts of each file,
so that a prompt is found without opening all of them.
"""

# pyarrow leaves parts of its signatures untyped.
# pyright: standard

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
import numpy as np

from streamppo import durable
from streamppo.errors import JournalError
from streamppo.process import phase
from streamppo.queue.rules.records import ArchivedBatch, PublishedVersion
from streamppo.queue.store import batch_parts, zarr_zip
from streamppo.queue.store.columns import (
    FLAT,
    LEARNED,
    RAGGED,
    Attributes,
    Column,
    batch_columns,
    decode_words,
    explanations,
    record_columns,
    to_batch,
    verify,
)
from streamppo.queue.store.journal import Journal
from streamppo.types import Batch, Floats, TokenRecord, WireStruct

if TYPE_CHECKING:
    import pyarrow


class WrittenFile(WireStruct, frozen=True):
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

    def write(self, batch: Batch, learned: TokenRecord | None = None) -> ArchivedBatch:
        """Make `batch` durable, but for its name, which `settle` gives it; returns the journal's record of the file.

        `learned` has one number for each token of its completions. Raises `JournalError` if the disk refuses.
        """
        return self.gather(batch.version, [write(self.folder, batch, learned or TokenRecord())])

    def gather(self, version: int, written: Sequence[WrittenFile]) -> ArchivedBatch:
        """Note the files of all parts of a batch, which shards have written; returns the journal's record of them."""
        self._asides[version] = [Path(one.path) for one in written]
        return ArchivedBatch(
            files=tuple(one.sha256 for one in written),
            first_prompt=min(one.first_prompt for one in written),
            last_prompt=max(one.last_prompt for one in written),
        )

    def settle(self, made: PublishedVersion) -> None:
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
        return to_batch(columns, attributes)

    def batch_and_record(self, version: int) -> tuple[Batch, dict[str, list[Floats]]]:
        """The batch and its `learned` numbers, in one reading. Raises `JournalError` if it is missing or damaged."""
        columns, attributes = self._read(version)
        return to_batch(columns, attributes), record_columns(columns)

    def table(self, version: int) -> "pyarrow.Table":
        """The batch as a pyarrow Table with one row for each trajectory; `.to_pandas()` makes it a frame."""
        import pyarrow

        columns, attributes = self._read(version)
        texts = explanations(columns)
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
        words = {name: decode_words(columns.pop(name), known) for name, known in attributes.words().items()}
        told = {"explanation": texts} if any(texts) else {}
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
        return found[0] if len(found) == 1 and not found[0][1].rows else _merge_columns(found)


def open(run: Path) -> Archive:
    """The archive of the run in the folder `run`. Raises `JournalError` if it has none."""
    journal = Journal.open_run(run)
    versions = journal.versions().values()
    journal.close()
    return Archive(run / "archive", checksums(versions))


def checksums(versions: Iterable[PublishedVersion]) -> dict[int, tuple[str, ...]]:
    """The SHA-256 of the files of each archived batch, by the batch's version."""
    return {made.version - 1: made.archived.files for made in versions if made.archived}


@phase("archive")
def write(folder: Path, batch: Batch, learned: TokenRecord) -> WrittenFile:
    """Make a batch, or a part of one, durable, but for its name; `learned` has a number for each of its tokens.

    Raises `JournalError` if the disk refuses.
    """
    path = _path(folder, batch.version)
    aside = durable.aside(path.with_name(f"{path.name}.{uuid4().hex}"))
    with durable.naming(path, JournalError):
        durable.folder(folder)
        arrays, attributes = batch_columns(batch, learned)
        content = zarr_zip.pack(arrays, msgspec.to_builtins(attributes))
        aside.write_bytes(content)
        durable.flush(aside)
    sha256 = hashlib.sha256(content).hexdigest()
    prompts = [trajectory.identity.prompt for trajectory in batch.trajectories]
    return WrittenFile(path=str(aside), sha256=sha256, first_prompt=min(prompts), last_prompt=max(prompts))


def _path(folder: Path, version: int, part: str = "") -> Path:
    return folder / f"{version:08d}{part}.zarr.zip"


def _read(path: Path, expected: str) -> tuple[dict[str, Column], Attributes]:
    """The columns and attributes of a file. Raises `JournalError` if it is missing or damaged."""
    try:
        with durable.reading(path) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise JournalError(f"{path}: damaged: its SHA-256 is not the one that was recorded")
            columns, attributes = zarr_zip.unpack(file)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error}") from error
    except zarr_zip.Strange as error:
        raise JournalError(f"{path}: not as streamppo writes it: {error}") from error
    try:
        told = msgspec.json.decode(attributes, type=Attributes)
        verify(columns, told)
    except (ValueError, LookupError, RecursionError) as error:
        raise JournalError(f"{path}: no batch: {error}") from error
    return columns, told


def _merge_columns(found: Sequence[tuple[dict[str, Column], Attributes]]) -> tuple[dict[str, Column], Attributes]:
    """The columns of a whole batch, of those of its parts."""
    batch = batch_parts.merge([to_batch(columns, attributes) for columns, attributes in found])
    if len({frozenset(columns).intersection(LEARNED) for columns, _ in found}) > 1:
        raise JournalError(f"the batch of version {batch.version} came in parts with different columns")
    by_row: dict[str, dict[int, Floats]] = {}
    for columns, attributes in found:
        for name, numbers in record_columns(columns).items():
            by_row.setdefault(name, {}).update(zip(attributes.rows, numbers, strict=True))
    flat = {name: np.concatenate([rows[row] for row in sorted(rows)]).tobytes() for name, rows in by_row.items()}
    return batch_columns(batch, TokenRecord(**flat))
