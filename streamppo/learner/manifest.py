"""Manifests say which checkpoints are complete, and that their files are as they were written. Needs no torch.

A disk may be a node's own: each rank hashes and verifies the files that it wrote, and a folder need not hold others.

runs/NAME/checkpoints/00000050/        one folder for each version
    *.distcp  .metadata                torch.distributed.checkpoint: policy or its adapters, critic, optimizer, RNG of
                                       every rank, and a reference that follows the policy
    manifest.json                      the rest of the state, and the SHA-256 of each rank's files; written last
runs/NAME/checkpoints/00000050.damaged what was found damaged
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
    # Ray comes with it, and those that look for a checkpoint need none.
    from streamppo.learner.history import History

MANIFEST = "manifest.json"
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.]*[A-Za-z0-9_]$")]
"""The name of a file in the checkpoint's folder: no path leads out of it."""

log = logging.getLogger(__name__)


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a checkpoint that is no tensor.

    `version` is the queue's position too: batch number `version` is the next to be trained on. `digest` is that of the
    weights as they were pushed, known when they are published; `beta` the adaptive weight of the KL in the reward;
    `bad_steps` are the policy's in a row, and those of a critic with steps of its own; `bonus` the coefficient and the
    weight of an entropy bonus that is steered. `reference_moved` says that a reference is among the tensors: it is the
    run's first model no more. `lag` is the lag that steers itself (`algorithms.lag.Lag`), if it does.
    """

    version: int
    digest: str
    ranks: int
    beta: float
    bad_steps: tuple[int, int]
    bonus: tuple[float, float] | None = None
    reference_moved: bool = False
    lag: tuple[int, float, int] | None = None


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256 of files by name: those that all ranks read, and those that each rank wrote."""

    shared: dict[Name, str]
    ranks: tuple[dict[Name, str], ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of manifest.json; `check` is the SHA-256 of the rest."""

    state: State
    files: Files
    check: str


class Damaged(CheckpointError):
    """A file is not as it was written, or of another run."""


def seal(folder: Path, pattern: str) -> dict[str, str]:
    """Flush the files of `folder` whose names match `pattern`; return the SHA-256 of each."""
    files = sorted(folder.glob(pattern))
    for path in files:
        durable.flush(path)
    return {path.name: durable.sha256(path) for path in files}


def write(folder: Path, state: State, files: Files) -> None:
    """Add and flush the manifest of `folder`, whose files are flushed."""
    manifest = Manifest(state=state, files=files, check=_check(state, files))
    durable.write(folder / MANIFEST, json.dumps(msgspec.to_builtins(manifest), indent=1).encode())


def read(path: Path, past: "History | None" = None) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises `Damaged`, also if it is not of the run's `past`."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise Damaged(f"{path / MANIFEST}: cannot be read: {error}") from error
    if manifest.check != _check(manifest.state, manifest.files) or path.name != f"{manifest.state.version:08d}":
        raise Damaged(f"{path / MANIFEST}: damaged: it does not match its own checksum")
    if past is not None and (reason := past.refusal(manifest.state.version, manifest.state.digest)):
        raise Damaged(f"{path}: {reason}")
    return manifest


def verify(
    path: Path,
    rank: int,
    shards_of: int | None = None,
    fetch: Callable[[str, str, Path], None] | None = None,
    past: "History | None" = None,
) -> State:
    """The state in the checkpoint at `path`, once the files that `rank` reads are verified.

    They are its own, and those of the rank `shards_of`, which wrote the shards of both if a model has several copies.
    Files that are missing or damaged come by `fetch` (version, name, folder), if there is one. Raises `Damaged`, also
    if its weights are not those of the run's `past`, or `CheckpointError` for a file that is not there; both name it.
    """
    if fetch is not None and not (path / MANIFEST).is_file():
        fetch(path.name, MANIFEST, path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: not on the disk of rank {rank}, which reads a part of it")
    manifest = read(path, past)
    writers = {rank, rank if shards_of is None else shards_of}
    read_here = [manifest.files.ranks[writer] for writer in writers if writer < manifest.state.ranks]
    files = {name: expected for some in (manifest.files.shared, *read_here) for name, expected in some.items()}
    for name, expected in files.items():
        defect = _defect(path / name, expected, rank)
        if defect is not None and fetch is not None:
            fetch(path.name, name, path)
            defect = _defect(path / name, expected, rank)
        if defect is not None:
            raise defect
    return manifest.state


def _defect(file: Path, expected: str, rank: int) -> CheckpointError | None:
    if not file.is_file():
        return CheckpointError(f"{file}: not on the disk of rank {rank}, which reads it")
    if durable.sha256(file) != expected:
        return Damaged(f"{file}: damaged (its SHA-256 is not the manifest's)")
    return None


def is_of(path: Path, past: "History | None") -> bool:
    """Tell, and say why not, if the manifest of the checkpoint at `path` is whole and of the run's `past`."""
    try:
        read(path, past)
    except Damaged as error:
        log.info("%s", error)
        return False
    return True


def verify_whole(path: Path, past: "History | None" = None) -> State:
    """The state in the checkpoint at `path`, once the files of every rank are verified: all of them are here.

    Raises `Damaged`, or `CheckpointError` for a file that is not there, or if it is not of the run's `past`.
    """
    state = read(path, past).state
    for rank in range(state.ranks):
        verify(path, rank)
    return state


def newest(folder: Path, at_most: float = math.inf, past: "History | None" = None) -> Path | None:
    """The newest checkpoint under `folder` with a whole manifest, or None, of versions up to `at_most`.

    One whose manifest is damaged, or not of the run's `past`, is named and moved out of the way. The ranks verify the
    files.
    """
    for path in reversed([path for path in complete(folder) if int(path.name) <= at_most]):
        try:
            read(path, past)
        except Damaged as error:
            set_aside(path, error)
        else:
            return path
    return None


def set_aside(path: Path, reason: object) -> None:
    """Name a damaged checkpoint, and move it out of the way."""
    damaged = path.with_name(f"{path.name}.damaged")
    log.info("%s; moved to %s, going on from the checkpoint before it", reason, damaged.name)
    shutil.rmtree(damaged, ignore_errors=True)
    path.rename(damaged)


def drop(folder: Path, keep: int, keep_every: int) -> None:
    """Remove all but the newest `keep` checkpoints and those whose version `keep_every` divides."""
    for path in complete(folder)[:-keep]:
        if not keep_every or int(path.name) % keep_every:
            # First the name: half of a checkpoint must not look like a whole one.
            path.rename(durable.aside(path))
    for path in folder.glob(f"*{durable.ASIDE}"):
        shutil.rmtree(path)


def complete(folder: Path) -> list[Path]:
    """Every complete checkpoint under `folder`, oldest first."""
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit())


def seconds_to_write(folder: Path, model: Path) -> float:
    """Time that a checkpoint of the run may take: 6 s, and 10 s for each GB of the newest checkpoint under `folder`.

    Without one it is taken to be as large as six times the files of `model`: float32 weights and two moments.
    """
    written = [_bytes(path) for path in complete(folder)[-1:]] or [6 * _bytes(model)]
    return 6.0 + written[0] / 1e8


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def _check(state: State, files: Files) -> str:
    return hashlib.sha256(json.dumps(msgspec.to_builtins([state, files]), sort_keys=True).encode()).hexdigest()
