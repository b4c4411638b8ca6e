"""Checkpoints as folders of files: what is in them does not matter."""

import io
from pathlib import Path

from streamppo.learner.checkpoint import manifest
from streamppo.learner.checkpoint.manifest import CheckpointFiles, CheckpointState
from streamppo.learner.checkpoint.remote import CheckpointStore


def written(folder: Path, version: int, ranks: int = 2) -> Path:
    """A checkpoint by `ranks` ranks, of a file each, and one that all of them read."""
    path = folder / f"{version:08d}"
    path.mkdir(parents=True)
    for name in (".metadata", *(f"__{rank}_0.distcp" for rank in range(ranks))):
        (path / name).write_bytes(f"{name} of {version}".encode() * 100)
    owned = tuple(manifest.seal(path, f"__{rank}_*") for rank in range(ranks))
    state = CheckpointState(version=version, digest="d", ranks=ranks, beta=0.0, bad_steps=(0, 0))
    manifest.write(path, state, CheckpointFiles(shared=manifest.seal(path, ".metadata"), ranks=owned))
    return path


def copied(to: CheckpointStore, path: Path, *names: str) -> None:
    to.put(path.name, {name: io.BytesIO((path / name).read_bytes()) for name in names})
