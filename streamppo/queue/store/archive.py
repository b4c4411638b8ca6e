"""The durable record of all consumed batches: one zarr group for each update, each in a separate zip file.

runs/NAME/archive/00000042.zarr.zip            the batch of version 42, exactly
runs/NAME/archive/00000042.1-of-4.zarr.zip     if the queue has shards: one shard's part of the batch

    zarr.open_group(zarr.storage.ZipStore("00000042.zarr.zip", mode="r"))        opens a file

B trajectories are concatenated in flat columns: trajectory i has the entries `offsets[i] : offsets[i + 1]`, its prompt
has `prompt_offsets[i] : prompt_offsets[i + 1]`. Optional flat columns have separate offsets:

    token_rewards                   rewards of single tokens
    candidates, candidate_counts    with top-p or top-k, the tokens left of the distribution, and their number for each
                                    token of a completion (0: the whole vocabulary)
    teacher_logprobs                log-probs by a teacher that is a server
    routes, route_bytes             the experts of a mixture of experts, and the bytes per number in each trajectory; if
                                    some numbers take one byte (types/routes.py), `routes` is a column of bytes
    branches                        for trajectories whose tokens are a tree: pairs (start, parent), types/branches.py
    turns                           for agents' runs: (start, end, reused, delivered) of each turn, types/turns.py
    explanations                    the text that explains the rewards, in UTF-8

`components` is a table [B, components] of reward components; NaN if a trajectory lacks one. `source` is the data set of
each prompt, if a task has several. The learner's record has one number per token, computed when the update starts:
`values`, the critic's expectation before the token, if there is a critic; `proximal_logprobs`, if a pass computed them;
`advantages`.

In a part of a batch, the attribute `rows` lists the indices of its trajectories in the batch. The parts are read as one
batch. With segments, `segment` is a trajectory's number in its completion, and `prefix` is the number of tokens at the
end of its prompt that belong to earlier segments.

Each writer writes a file under a temporary name of its own. The journal's transaction that records the file's SHA-256
also gives the file its final name. A queue that was marked dead but still writes cannot make that transaction.
"""

# pyarrow leaves parts of its signatures untyped.
# pyright: standard

import hashlib
import re
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
    RAGGED,
    RECORD_COLUMNS,
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

FILE = re.compile(r"(\d+)(\.\d+-of-\d+)?\.zarr\.zip")


class WrittenFile(WireStruct, frozen=True):
    """A written file of a batch or a part: its temporary `path`, SHA-256, and smallest and largest prompt number."""

    path: str
    sha256: str
    first_prompt: int
    last_prompt: int


class Archive:
    """The batches of one run. `checksums` are the SHA-256 of the files of each recorded batch, by version."""

    def __init__(self, folder: Path, checksums: Mapping[int, tuple[str, ...]]) -> None:
        self.folder = folder
        self.checksums = dict(checksums)
        self._asides: dict[int, list[Path]] = {}

    def versions(self) -> list[int]:
        return sorted(self.checksums)

    def version_before(self, update: int | None) -> int:
        """The version of the batch that made version `update` (default: the newest). Raises `JournalError`."""
        versions = self.versions()
        if not versions:
            raise JournalError(f"{self.folder.parent}: no batch is in the archive yet")
        if update is not None and update - 1 not in versions:
            first, last = versions[0] + 1, versions[-1] + 1
            raise JournalError(
                f"{self.folder.parent}: no batch of update {update}: the archive has those of {first} to {last}"
            )
        return versions[-1] if update is None else update - 1

    def write(self, batch: Batch, record: TokenRecord | None = None) -> ArchivedBatch:
        """Write `batch` under a temporary name; return the journal's record. Raises `JournalError`."""
        return self.gather(batch.version, [write(self.folder, batch, record or TokenRecord())])

    def gather(self, version: int, written: Sequence[WrittenFile]) -> ArchivedBatch:
        """Remember the temporary names of a batch's files for `settle`; return the journal's record of the files."""
        self._asides[version] = [Path(file.path) for file in written]
        return ArchivedBatch(
            files=tuple(file.sha256 for file in written),
            first_prompt=min(file.first_prompt for file in written),
            last_prompt=max(file.last_prompt for file in written),
        )

    def settle(self, published: PublishedVersion) -> None:
        """Give the files of a version's batch their final names, in the transaction that records it."""
        if published.archived is None:
            return
        version, files = published.version - 1, published.archived.files
        paths = self.paths(version, len(files))
        for aside, path in zip(self._asides.pop(version), paths, strict=True):
            with durable.naming(path, JournalError):
                durable.rename(aside, path)
        self.checksums[version] = files

    def sweep(self) -> None:
        """Delete temporary files of dead writers, and files that are not kept. Call it after fencing the journal."""
        first = min(self.checksums, default=0)
        with durable.naming(self.folder, JournalError):
            for path in self.folder.glob("*"):
                # File browsers, notebook servers and NFS leave files of their own.
                file = FILE.fullmatch(path.name)
                if path.name.endswith(durable.ASIDE) or (file and int(file[1]) < first):
                    path.unlink(missing_ok=True)

    def drop(self, before: int) -> None:
        """Delete the batches of versions below `before`, after `Journal.forget`. Raises `JournalError`."""
        # A transaction in another thread may add a batch meanwhile.
        for version in [number for number in list(self.checksums) if number < before]:
            for path in self.paths(version, len(self.checksums[version])):
                with durable.naming(path, JournalError):
                    path.unlink(missing_ok=True)
            del self.checksums[version]

    def columns(self, version: int) -> dict[str, Column]:
        """The columns of a batch as numpy arrays. Raises `JournalError` if it is missing or damaged."""
        return self._read(version)[0]

    def batch(self, version: int) -> Batch:
        """The batch exactly as it was trained on. Raises `JournalError` if it is missing or damaged."""
        columns, attributes = self._read(version)
        return to_batch(columns, attributes)

    def batch_and_record(self, version: int) -> tuple[Batch, dict[str, list[Floats]]]:
        columns, attributes = self._read(version)
        return to_batch(columns, attributes), record_columns(columns)

    def table(self, version: int) -> "pyarrow.Table":
        """The batch as a pyarrow Table with one row per trajectory; `.to_pandas()` gives a DataFrame."""
        import pyarrow

        columns, attributes = self._read(version)
        texts = explanations(columns)
        at, prompt_at = columns.pop("offsets"), columns.pop("prompt_offsets")
        names = [name for name in (*FLAT, *RECORD_COLUMNS) if name in columns]
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
        explained = {"explanation": texts} if any(texts) else {}
        return pyarrow.table({**columns, **words, **explained, **flat})

    def path(self, version: int) -> Path:
        return _path(self.folder, version)

    def paths(self, version: int, count: int) -> list[Path]:
        parts = [f".{number + 1}-of-{count}" for number in range(count)] if count > 1 else [""]
        return [_path(self.folder, version, part) for part in parts]

    def _read(self, version: int) -> tuple[dict[str, Column], Attributes]:
        path, expected = self.path(version), self.checksums.get(version)
        if expected is None:
            if version < min(self.checksums, default=0):
                raise JournalError(f"{path}: not kept: the archive begins with version {min(self.checksums)}")
            raise JournalError(f"{path}: no batch of version {version} was recorded")
        paths = self.paths(version, len(expected))
        parts = [_read(path, sha256) for path, sha256 in zip(paths, expected, strict=True)]
        return parts[0] if len(parts) == 1 and not parts[0][1].rows else _merge_columns(parts)


def open(run: Path) -> Archive:
    """Open the archive of the run in the folder `run`. Raises `JournalError` if there is none."""
    journal = Journal.open_run(run)
    versions = journal.versions().values()
    journal.close()
    return Archive(run / "archive", checksums(versions))


def checksums(versions: Iterable[PublishedVersion]) -> dict[int, tuple[str, ...]]:
    """The SHA-256 of the files of each archived batch, by the batch's version."""
    return {version.version - 1: version.archived.files for version in versions if version.archived}


@phase("archive")
def write(folder: Path, batch: Batch, record: TokenRecord) -> WrittenFile:
    """Write a batch, or a part of a batch, durably under a temporary name. Raises `JournalError` if that fails."""
    path = _path(folder, batch.version)
    aside = durable.aside(path.with_name(f"{path.name}.{uuid4().hex}"))
    with durable.naming(path, JournalError):
        durable.folder(folder)
        arrays, attributes = batch_columns(batch, record)
        content = zarr_zip.pack(arrays, msgspec.to_builtins(attributes))
        aside.write_bytes(content)
        durable.flush(aside)
    sha256 = hashlib.sha256(content).hexdigest()
    prompts = [trajectory.identity.prompt for trajectory in batch.trajectories]
    return WrittenFile(path=str(aside), sha256=sha256, first_prompt=min(prompts), last_prompt=max(prompts))


def _path(folder: Path, version: int, part: str = "") -> Path:
    return folder / f"{version:08d}{part}.zarr.zip"


def _read(path: Path, expected: str) -> tuple[dict[str, Column], Attributes]:
    try:
        with durable.reading(path, whole=True) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise JournalError(f"{path}: damaged: its SHA-256 is not the one that was recorded")
            columns, attributes = zarr_zip.unpack(file)
    except FileNotFoundError as error:
        raise JournalError(
            f"{path}: cannot be read: there is no such file; if the folder was copied during the run, copy it again"
        ) from error
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error}") from error
    except zarr_zip.ForeignFile as error:
        raise JournalError(f"{path}: not as streamppo writes it: {error}") from error
    try:
        decoded = msgspec.json.decode(attributes, type=Attributes)
        verify(columns, decoded)
    except (ValueError, LookupError, RecursionError) as error:
        raise JournalError(f"{path}: no batch: {error}") from error
    return columns, decoded


def _merge_columns(parts: Sequence[tuple[dict[str, Column], Attributes]]) -> tuple[dict[str, Column], Attributes]:
    batch = batch_parts.merge([to_batch(columns, attributes) for columns, attributes in parts])
    if len({frozenset(columns).intersection(RECORD_COLUMNS) for columns, _ in parts}) > 1:
        raise JournalError(f"the batch of version {batch.version} came in parts with different columns")
    by_row: dict[str, dict[int, Floats]] = {}
    for columns, attributes in parts:
        for name, numbers in record_columns(columns).items():
            by_row.setdefault(name, {}).update(zip(attributes.rows, numbers, strict=True))
    flat = {name: np.concatenate([rows[row] for row in sorted(rows)]).tobytes() for name, rows in by_row.items()}
    return batch_columns(batch, TokenRecord(**flat))
