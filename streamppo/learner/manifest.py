"""Which checkpoints are complete, and whether their files are what was written. Needs no torch.

runs/NAME/checkpoints/00000050/        one folder for each version
    *.distcp  .metadata                torch.distributed.checkpoint: policy, critic, optimizer, controllers
    manifest.json                      the version, and the SHA-256 of every other file; written last
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from streamppo.errors import CheckpointError

MANIFEST = "manifest.json"


def write(folder: Path, version: int) -> None:
    """Checksum and flush every file of `folder`, then add and flush the manifest."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    checksums = {path.name: _sha256(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps({"version": version, "sha256": checksums}, indent=1))
    for path in (*files, folder / MANIFEST, folder):
        flush(path)


def verify(path: Path) -> int:
    """The version of the checkpoint at `path`. Raises `CheckpointError` that names a missing or damaged file."""
    checksums = _read(path)["sha256"]
    for name, expected in checksums.items():
        file = path / name
        if not file.is_file() or _sha256(file) != expected:
            raise CheckpointError(f"{file}: missing or damaged (its SHA-256 is not the manifest's)")
    return version(path)


def version(path: Path) -> int:
    """The version of the checkpoint at `path`, unverified."""
    return int(_read(path)["version"])


def complete(folder: Path) -> list[Path]:
    """Every complete checkpoint under `folder`, oldest first."""
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit())


def latest(folder: Path) -> Path:
    """The newest complete checkpoint under `folder`. Raises `CheckpointError` if there is none."""
    found = complete(folder)
    if not found:
        raise CheckpointError(f"{folder}: no complete checkpoint to resume from")
    return found[-1]


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return {"version": int(manifest["version"]), "sha256": dict(manifest["sha256"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
