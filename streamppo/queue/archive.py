"""The durable record of what was trained on: one zarr group for each update, each a zip file of its own.

runs/NAME/archive/00000042.zarr.zip       the batch of version 42, exactly

    zarr.open_group(zarr.storage.ZipStore("00000042.zarr.zip", mode="r"))        is all that it takes to read one

B trajectories lie one after another in flat columns: those of trajectory i are `offsets[i] : offsets[i + 1]`, its
prompt is `prompt_offsets[i] : prompt_offsets[i + 1]`. Where rewards stand on single tokens there is a flat column
`token_rewards` with offsets of its own, and where they have components a table of them [B, components], NaN where a
trajectory has none of a name. Where there is a critic, `values` has for each token what the critic expected before it
was sampled, as the update began. A file is complete when it has its name; it counts once the journal holds its SHA-256.

It is written under a name of its writer, and gets its own within the transaction that records it: a queue that was
given up for dead, and still writes, comes too late for that.
"""

# zarr and pyarrow leave parts of their signatures untyped.
# pyright: standard

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import ZstdCodec
from zarr.storage import ZipStore

from streamppo import durable
from streamppo.errors import JournalError
from streamppo.queue.journal import Journal
from streamppo.queue.records import Made
from streamppo.types import Batch, Identity, Trajectory, flags, floats, ints

FINISH = ("stop", "length")
FLAT = {"tokens": ints, "logprobs": floats, "versions": ints, "mask": flags}
"""Columns with one entry for each token of a completion."""


class Archive:
    """The batches of one run. `checksums` are the SHA-256 of the files that count, by version."""

    def __init__(self, folder: Path, checksums: Mapping[int, str]) -> None:
        self.folder = folder
        self.checksums = dict(checksums)
        self._writer = uuid4().hex

    def versions(self) -> list[int]:
        """The versions whose batch is here, in order."""
        return sorted(self.checksums)

    def write(self, batch: Batch, values: bytes = b"") -> str:
        """Make `batch` durable, but for its name, which `settle` gives it; returns the SHA-256 of its file.

        `values` are one float32 for each token of its completions, or empty. Raises `JournalError` if the disk refuses.
        """
        aside = self._aside(batch.version)
        with durable.naming(self.path(batch.version), JournalError):
            durable.folder(self.folder)
            _write(aside, batch, values)
            durable.flush(aside)
            return durable.sha256(aside)

    def settle(self, made: Made) -> None:
        """Name the batch that made a version, if one did; it counts from here on. Only for whoever holds the journal.

        Raises `JournalError` if the disk refuses.
        """
        if made.archive_sha256 is None:
            return
        version = made.version - 1
        with durable.naming(self.path(version), JournalError):
            durable.rename(self._aside(version), self.path(version))
        self.checksums[version] = made.archive_sha256

    def sweep(self) -> None:
        """Delete what others had not named when they died. Only for whoever holds the journal."""
        with durable.naming(self.folder, JournalError):
            for path in self.folder.glob(f"*{durable.ASIDE}"):
                path.unlink(missing_ok=True)

    def columns(self, version: int) -> dict[str, NDArray[Any]]:
        """The columns of a batch as numpy arrays. Raises `JournalError` if it is missing or damaged."""
        return self._read(version)[0]

    def batch(self, version: int) -> Batch:
        """The very batch that was trained on. Raises `JournalError` if it is missing or damaged."""
        columns, attributes = self._read(version)
        return _batch(columns, attributes)

    def table(self, version: int) -> Any:
        """The batch as a pyarrow Table with one row for each trajectory; `.to_pandas()` makes it a frame."""
        import pyarrow

        columns, attributes = self._read(version)
        at, prompt_at = columns.pop("offsets"), columns.pop("prompt_offsets")
        names = [name for name in (*FLAT, "values") if name in columns]
        flat = {name: pyarrow.ListArray.from_arrays(at.astype(np.int32), columns.pop(name)) for name in names}
        flat["prompt_tokens"] = pyarrow.ListArray.from_arrays(prompt_at.astype(np.int32), columns.pop("prompt_tokens"))
        if "token_rewards" in columns:
            rewards_at = columns.pop("token_reward_offsets").astype(np.int32)
            flat["token_rewards"] = pyarrow.ListArray.from_arrays(rewards_at, columns.pop("token_rewards"))
        if "components" in columns:
            columns |= dict(zip(attributes["component_names"], columns.pop("components").T, strict=True))
        words = {name: np.take(attributes[f"{name}s"], columns.pop(name)) for name in ("task", "actor", "finish")}
        return pyarrow.table({**columns, **words, **flat})

    def path(self, version: int) -> Path:
        """The file of the batch of `version`."""
        return self.folder / f"{version:08d}.zarr.zip"

    def _aside(self, version: int) -> Path:
        path = self.path(version)
        return durable.aside(path.with_name(f"{path.name}.{self._writer}"))

    def _read(self, version: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        path, expected = self.path(version), self.checksums.get(version)
        if expected is None:
            raise JournalError(f"{path}: no batch of version {version} was recorded")
        try:
            found = durable.sha256(path)
        except OSError as error:
            raise JournalError(f"{path}: cannot be read: {error}") from error
        if found != expected:
            raise JournalError(f"{path}: damaged: its SHA-256 is not the one that was recorded")
        with ZipStore(path, mode="r") as store:
            group = zarr.open_group(store, mode="r")
            return {name: array[:] for name, array in group.arrays()}, dict(group.attrs)  # pyright: ignore


def open(run: Path) -> Archive:
    """The archive of the run in the folder `run`. Raises `JournalError` if it has none."""
    journal = Journal.of(run)
    made = journal.versions().values()
    journal.close()
    checksums = {version.version - 1: version.archive_sha256 for version in made if version.archive_sha256}
    return Archive(run / "archive", checksums)


def _write(path: Path, batch: Batch, values: bytes) -> None:
    rows = batch.trajectories
    words = {"task": [row.identity.task for row in rows], "actor": [row.actor for row in rows]}
    known = {name: sorted(set(column)) for name, column in words.items()}
    known["finish"], words["finish"] = list(FINISH), [row.finish for row in rows]
    columns: dict[str, NDArray[Any]] = {
        "prompt": np.array([row.identity.prompt for row in rows]),
        "sample": np.array([row.identity.sample for row in rows]),
        "attempt": np.array([row.identity.attempt for row in rows]),
        "reward": np.array([row.reward for row in rows], dtype=np.float64),
        "prompt_tokens": ints(b"".join(row.prompt_tokens for row in rows)),
        "prompt_offsets": _offsets([len(row.prompt_tokens) // 4 for row in rows]),
        "offsets": _offsets([row.num_tokens for row in rows]),
        **{name: read(b"".join(getattr(row, name) for row in rows)) for name, read in FLAT.items()},
        **{name: np.array([known[name].index(word) for word in column]) for name, column in words.items()},
    }
    attributes: dict[str, Any] = {"version": batch.version, "min_version": batch.min_version}
    attributes |= {f"{name}s": found for name, found in known.items()}
    if any(row.token_rewards for row in rows):
        columns["token_rewards"] = floats(b"".join(row.token_rewards for row in rows))
        columns["token_reward_offsets"] = _offsets([len(row.token_rewards) // 4 for row in rows])
    if values:
        columns["values"] = floats(values)
        assert len(columns["values"]) == len(columns["tokens"]), "one value for each token"
    if names := sorted({name for row in rows for name in row.components}):
        columns["components"] = np.array([[row.components.get(name, np.nan) for name in names] for row in rows])
        attributes["component_names"] = names
    if not all(row.versions_known for row in rows):
        columns["versions_known"] = np.array([row.versions_known for row in rows])
    with ZipStore(path, mode="w") as store:
        group = zarr.create_group(store, attributes=attributes)
        for name, column in columns.items():
            group.create_array(name, data=column, chunks=column.shape, compressors=ZstdCodec(level=1))


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _span(column: NDArray[Any], offsets: Any, row: int) -> NDArray[Any]:
    return column[offsets[row] : offsets[row + 1]]


def _present(names: Sequence[str], numbers: NDArray[np.float64]) -> dict[str, float]:
    return {name: float(number) for name, number in zip(names, numbers, strict=True) if not np.isnan(number)}


def _batch(columns: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> Batch:
    at, prompt_at = columns["offsets"].tolist(), columns["prompt_offsets"].tolist()
    words = {name: np.take(attributes[f"{name}s"], columns[name]).tolist() for name in ("task", "actor", "finish")}
    token_rewards, rewards_at = columns.get("token_rewards"), columns.get("token_reward_offsets")
    components, names = columns.get("components"), attributes.get("component_names", ())
    known = columns.get("versions_known")
    rows: list[Trajectory] = []
    for row, reward in enumerate(columns["reward"].tolist()):
        span = slice(at[row], at[row + 1])
        number = {name: int(columns[name][row]) for name in ("prompt", "sample", "attempt")}
        rows.append(
            Trajectory(
                identity=Identity(task=words["task"][row], **number),
                actor=words["actor"][row],
                prompt_tokens=columns["prompt_tokens"][prompt_at[row] : prompt_at[row + 1]].tobytes(),
                finish=words["finish"][row],
                reward=reward,
                token_rewards=b"" if token_rewards is None else _span(token_rewards, rewards_at, row).tobytes(),
                components={} if components is None else _present(names, components[row]),
                versions_known=known is None or bool(known[row]),
                **{name: columns[name][span].tobytes() for name in FLAT},  # pyright: ignore[reportArgumentType]
            )
        )
    return Batch(version=attributes["version"], min_version=attributes["min_version"], trajectories=tuple(rows))
