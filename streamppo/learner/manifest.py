"""Manifests say which checkpoints are complete, and that their files are as they were written. Needs no torch.

runs/NAME/checkpoints/00000050/        one folder for each version
    *.distcp  .metadata                torch.distributed.checkpoint: policy, critic, optimizer, RNG of every rank
    manifest.json                      the rest of the state, and the SHA-256 of every other file; written last
runs/NAME/checkpoints/00000050.damaged what was found damaged
"""

import hashlib
import json
import logging
import math
import shutil
from pathlib import Path

import msgspec

from streamppo import durable
from streamppo.errors import CheckpointError

MANIFEST = "manifest.json"

log = logging.getLogger(__name__)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a checkpoint that is no tensor.

    `version` is the queue's position too: batch number `version` is the next to be trained on. `digest` is that of the
    weights as they were pushed, known when they are published; `beta` the adaptive weight of the KL in the reward.
    """

    version: int
    digest: str
    ranks: int
    beta: float
    bad_steps: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of manifest.json; `check` is the SHA-256 of the rest."""

    state: State
    sha256: dict[str, str]
    check: str


def write(folder: Path, state: State) -> None:
    """Checksum and flush every file of `folder`, then add and flush the manifest."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    checksums = {path.name: durable.sha256(path) for path in files}
    manifest = Manifest(state=state, sha256=checksums, check=_check(state, checksums))
    for path in files:
        durable.flush(path)
    durable.write(folder / MANIFEST, json.dumps(msgspec.to_builtins(manifest), indent=1).encode())


def verify(path: Path) -> State:
    """The state in the checkpoint at `path`. Raises `CheckpointError` that names a missing or damaged file."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from error
    if manifest.check != _check(manifest.state, manifest.sha256) or path.name != f"{manifest.state.version:08d}":
        raise CheckpointError(f"{path / MANIFEST}: damaged: it does not match its own checksum")
    for name, expected in manifest.sha256.items():
        file = path / name
        if not file.is_file() or durable.sha256(file) != expected:
            raise CheckpointError(f"{file}: missing or damaged (its SHA-256 is not the manifest's)")
    return manifest.state


def newest(folder: Path, at_most: float = math.inf) -> Path | None:
    """The newest checkpoint under `folder` that is whole, or None, of versions up to `at_most`.

    A damaged one is named and moved out of the way.
    """
    for path in reversed([path for path in complete(folder) if int(path.name) <= at_most]):
        try:
            verify(path)
        except CheckpointError as error:
            damaged = path.with_name(f"{path.name}.damaged")
            log.info("%s; moved to %s, going on from the checkpoint before it", error, damaged.name)
            shutil.rmtree(damaged, ignore_errors=True)
            path.rename(damaged)
        else:
            return path
    return None


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


def _check(state: State, checksums: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([msgspec.to_builtins(state), checksums], sort_keys=True).encode()).hexdigest()
