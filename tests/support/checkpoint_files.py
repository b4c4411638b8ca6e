"""Checkpoints as folders of files with arbitrary content."""

import io
from pathlib import Path

from streamppo.learner.checkpoint import manifest
from streamppo.learner.checkpoint.manifest import CheckpointFiles, CheckpointState
from streamppo.learner.checkpoint.remote import CheckpointStore


def written(folder: Path, version: int, ranks: int = 2) -> Path:
    """Write a checkpoint of `ranks` ranks with one file each and one shared file; return its folder."""
    path = folder / f"{version:08d}"
    path.mkdir(parents=True)
    for name in (".metadata", *(f"__{rank}_0.distcp" for rank in range(ranks))):
        (path / name).write_bytes(f"{name} of {version}".encode() * 100)
    owned = tuple(manifest.flush_and_hash(path, f"__{rank}_*") for rank in range(ranks))
    state = CheckpointState(version=version, digest="d", ranks=ranks, beta=0.0, bad_steps=(0, 0))
    manifest.write(path, state, CheckpointFiles(shared=manifest.flush_and_hash(path, ".metadata"), ranks=owned))
    return path


def copied(to: CheckpointStore, path: Path, *names: str) -> None:
    to.put(path.name, {name: io.BytesIO((path / name).read_bytes()) for name in names})
