"""Manifests mark checkpoints as complete, and hold the hashes that verify their files. Needs no torch.

Nodes may have separate disks: each rank hashes and verifies its own files, and a folder may lack other ranks' files.

runs/NAME/checkpoints/00000050/        one folder for each version
    *.distcp  .metadata                torch.distributed.checkpoint: policy or its adapters, critic, optimizer, RNG of
                                       every rank, and a reference that follows the policy
    manifest.json                      all other state, and the SHA-256 of each rank's files; written last
runs/NAME/checkpoints/00000050.damaged a checkpoint that was found damaged
"""

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from streamppo import durable
from streamppo.errors import CheckpointError

if TYPE_CHECKING:
    # `history` imports Ray, which a search for checkpoints does not need.
    from streamppo.learner.checkpoint.history import History

MANIFEST = "manifest.json"
Fetch: TypeAlias = Callable[[str, str, Path], None]
"""(version, file name, folder) -> None: fetches the file from the run's address into the folder."""
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.]*[A-Za-z0-9_]$")]

log = logging.getLogger(__name__)


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state in a checkpoint that is not in its tensors.

    `version` is also the queue's position: batch number `version` is the next to train on. `digest` is the hash of the
    pushed weights. `beta`, `bad_steps`, `bonus` and `reference_moved` are those of `adaptation.UpdaterState`; a moved
    reference is in the checkpoint. `lag` is an adaptive lag (`algorithms.lag.AdmittedLag`).
    """

    version: int
    digest: str
    ranks: int
    beta: float
    bad_steps: tuple[int, int]
    bonus: tuple[float, float] | None = None
    reference_moved: bool = False
    lag: tuple[int, float, int] | None = None


class CheckpointFiles(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256 by file name: `shared` for files that all ranks read, `ranks` for each rank's own files."""

    shared: dict[Name, str]
    ranks: tuple[dict[Name, str], ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of manifest.json; `check` is the SHA-256 of the other fields."""

    state: CheckpointState
    files: CheckpointFiles
    check: str


class DamagedFile(CheckpointError):
    """A file is damaged or belongs to another run."""


def flush_and_hash(folder: Path, pattern: str) -> dict[str, str]:
    """Flush the files of `folder` that match `pattern`; return the SHA-256 of each."""
    files = sorted(folder.glob(pattern))
    for path in files:
        durable.flush(path)
    return {path.name: durable.sha256(path) for path in files}


def write(folder: Path, state: CheckpointState, files: CheckpointFiles) -> None:
    """Write and flush the manifest of `folder`, whose other files are already flushed."""
    manifest = Manifest(state=state, files=files, check=_check(state, files))
    durable.write(folder / MANIFEST, json.dumps(msgspec.to_builtins(manifest), indent=1).encode())


def read(path: Path, past: "History | None" = None) -> Manifest:
    """Read the manifest of the checkpoint at `path`. Raises `DamagedFile` for damage and for another run's manifest."""
    try:
        with durable.reading(path / MANIFEST, whole=True) as file:
            manifest = msgspec.json.decode(file.read(), type=Manifest)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedFile(f"{path / MANIFEST}: cannot be read: {error}") from error
    if manifest.check != _check(manifest.state, manifest.files) or path.name != f"{manifest.state.version:08d}":
        raise DamagedFile(f"{path / MANIFEST}: damaged: it does not match its own checksum")
    if past is not None and (reason := past.refusal(manifest.state.version, manifest.state.digest)):
        raise DamagedFile(f"{path}: {reason}")
    return manifest


def verify(
    path: Path, rank: int, shards_of: int | None = None, fetch: Fetch | None = None, past: "History | None" = None
) -> CheckpointState:
    """Verify the files that `rank` reads in the checkpoint at `path`, and return its state.

    With several replicas, a rank also reads the files of the rank `shards_of`, which wrote its shards. `fetch`, if
    given, fetches missing and damaged files. Raises `DamagedFile` for damage and for weights outside of the run's
    `past`, and `CheckpointError` for a missing file; both name the file.
    """
    _fetch_manifest(path, fetch)
    if not path.is_dir():
        raise CheckpointError(f"{path}: missing on the disk of rank {rank}, which reads a part of it")
    manifest = read(path, past)
    writers = {rank, rank if shards_of is None else shards_of}
    read_here = [manifest.files.ranks[writer] for writer in writers if writer < manifest.state.ranks]
    files = {name: expected for listed in (manifest.files.shared, *read_here) for name, expected in listed.items()}
    for name, expected in files.items():
        defect = _defect(path / name, expected, rank)
        if defect is not None and fetch is not None:
            fetch(path.name, name, path)
            defect = _defect(path / name, expected, rank)
        if defect is not None:
            raise defect
    return manifest.state


def _fetch_manifest(path: Path, fetch: Fetch | None) -> None:
    if fetch is not None and not (path / MANIFEST).is_file():
        fetch(path.name, MANIFEST, path)


def _defect(file: Path, expected: str, rank: int) -> CheckpointError | None:
    if not file.is_file():
        return CheckpointError(f"{file}: missing on the disk of rank {rank}, which reads it")
    if durable.sha256(file) != expected:
        return DamagedFile(f"{file}: damaged (its SHA-256 is not the manifest's)")
    return None


def is_of(path: Path, past: "History | None") -> bool:
    """True if the manifest of the checkpoint at `path` is intact and of the run's `past`; if not, log the reason."""
    try:
        read(path, past)
    except DamagedFile as error:
        log.info("%s", error)
        return False
    return True


def verify_whole(path: Path, past: "History | None" = None, fetch: Fetch | None = None) -> CheckpointState:
    """Verify all ranks' files of a checkpoint, and return its state; arguments and errors are as in `verify`."""
    _fetch_manifest(path, fetch)
    state = read(path, past).state
    for rank in range(state.ranks):
        verify(path, rank, fetch=fetch)
    return state


def newest(folder: Path, at_most: float = math.inf, past: "History | None" = None) -> Path | None:
    """The newest checkpoint up to version `at_most` under `folder` with an intact manifest, or None.

    A checkpoint with a damaged manifest or outside of the run's `past` is logged and moved aside. Files other than the
    manifest are not verified here.
    """
    for path in reversed([path for path in complete(folder) if int(path.name) <= at_most]):
        try:
            read(path, past)
        except DamagedFile as error:
            set_aside(path, error)
        else:
            return path
    return None


def set_aside(path: Path, reason: object) -> None:
    """Log why a checkpoint is damaged, and rename its folder to *.damaged."""
    damaged = path.with_name(f"{path.name}.damaged")
    log.info("%s; moved to %s, continuing from the checkpoint before it", reason, damaged.name)
    shutil.rmtree(damaged, ignore_errors=True)
    path.rename(damaged)


def drop(folder: Path, keep: int, keep_every: int) -> None:
    """Remove all checkpoints except the newest `keep` and each whose version is a multiple of `keep_every`."""
    for path in complete(folder)[:-keep]:
        if not keep_every or int(path.name) % keep_every:
            # Renaming first ensures that a partly deleted checkpoint never looks complete.
            path.rename(durable.aside(path))
    for path in folder.glob(f"*{durable.ASIDE}"):
        shutil.rmtree(path)


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints under `folder`, oldest first."""
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit())


def version_of(checkpoint: Path | str | None) -> int:
    """The version of a checkpoint's folder; 0, the version of the first model, for None."""
    return int(Path(checkpoint).name) if checkpoint else 0


def seconds_to_write(folder: Path, model: Path) -> float:
    """The time limit for writing a checkpoint: 6 s plus 10 s per GB of the newest checkpoint under `folder`.

    If there is none, its size is taken to be six times `model`'s files: float32 weights and two moments.
    """
    written = [_bytes(path) for path in complete(folder)[-1:]] or [6 * _bytes(model)]
    return 6.0 + written[0] / 1e8


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def _check(state: CheckpointState, files: CheckpointFiles) -> str:
    return hashlib.sha256(json.dumps(msgspec.to_builtins([state, files]), sort_keys=True).encode()).hexdigest()
