"""A foreign checkpoint is data: it runs no code, and has no file elsewhere."""

import io
import os
import pathlib
import pickle
import random
import sys
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from streamppo.errors import CheckpointError
from streamppo.learner.checkpoint import distcp, manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Code:
    """A pickle that makes the folder `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def state() -> dict[str, Any]:
    return {"policy": {"w": torch.zeros(3, 2), "b": torch.zeros(2, dtype=torch.bfloat16)}, "own": {"lr": 0.0, "of": []}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"policy": {"w": torch.ones(3, 2), "b": torch.ones(2, dtype=torch.bfloat16)}}
    dcp.save({**tensors, "own": {"lr": 0.1, "of": ["w", "b"]}}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    return tmp_path / "checkpoint"


def test_tensors_and_plain_values_come_back(path: Path) -> None:
    found = state()
    distcp.load(found, path, alone=True)
    assert found["own"] == {"lr": 0.1, "of": ["w", "b"]}
    assert found["policy"]["w"].eq(1).all() and found["policy"]["b"].eq(1).all()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_checkpoint_of_another_python_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Python 3.13 has the class of a path in a module of its own."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, pathlib)
        patch.setattr(PosixPath, "__module__", module)
        dcp.save({"own": {"lr": 0.1}}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert module.encode() in (tmp_path / "checkpoint" / ".metadata").read_bytes()
    found = {"own": {"lr": 0.0}}
    distcp.load(found, tmp_path / "checkpoint", alone=True)
    assert found == {"own": {"lr": 0.1}}


def test_metadata_that_name_code_are_refused_and_nothing_runs(path: Path, tmp_path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "marker")))
    with pytest.raises(CheckpointError, match=r"names posix.mkdir"):
        distcp.load(state(), path, alone=True)
    assert not (tmp_path / "marker").exists()


def test_a_value_that_names_code_is_refused_and_nothing_runs(path: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    whole = io.BytesIO()
    torch.save(Code(tmp_path / "marker"), whole)
    (path / "planted").write_bytes(whole.getvalue())
    for index, one in metadata.storage_data.items():
        if index.fqn == "own.lr":
            one.relative_path, one.offset, one.length = "planted", 0, len(whole.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"cannot be loaded"):
        distcp.load(state(), path, alone=True)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "a/b"])
def test_no_file_of_a_checkpoint_lies_elsewhere(path: Path, name: str) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="files elsewhere"):
        distcp.load(state(), path, alone=True)
    files = manifest.CheckpointFiles(shared={name: "0"}, ranks=())
    known = manifest.CheckpointState(version=1, digest="", ranks=0, beta=0.0, bad_steps=(0, 0))
    (path.parent / "00000001").mkdir()
    manifest.write(path.parent / "00000001", known, files)
    with pytest.raises(manifest.DamagedFile, match="cannot be read"):
        manifest.read(path.parent / "00000001")


def test_random_mutations_of_the_metadata_end_with_a_sentence(path: Path) -> None:
    whole, generator = (path / ".metadata").read_bytes(), random.Random(7)
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(len(content))] = generator.randrange(256)
        (path / ".metadata").write_bytes(content[: generator.randint(1, 2 * len(content))])
        try:
            distcp.load(state(), path, alone=True)
        except CheckpointError:
            continue


def pairs(value: Any, depth: int) -> Any:
    """A pair of one pair of one pair, and so on: few bytes as a pickle."""
    for _ in range(depth):
        value = (value, value)
    return value


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a tuple", "an index", "a set"])
def test_a_key_that_takes_for_ever_to_hash_is_refused(path: Path, kind: str) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    if kind == "an index":
        index: Any = next(iter(metadata.storage_data))
        for _ in range(60):
            inner, index = index, MetadataIndex("x")
            object.__setattr__(index, "fqn", inner)
            object.__setattr__(index, "offset", inner)
        metadata.planner_data = [index]
    else:
        metadata.planner_data = [pairs((), 60)]
    content = pickle.dumps(metadata)
    # As a key it cannot be made here. MARK, the value, TUPLE1, FROZENSET.
    if kind == "a set":
        content = pickle.dumps(pairs((), 60))[:-1] + b"\x85\x91."
        content = content.replace(b"\x80\x04", b"\x80\x04(", 1)
    (path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="values, nearly all of them repeated"):
        distcp.load(state(), path, alone=True)


def test_metadata_of_many_tensors_are_read(tmp_path: Path) -> None:
    tensors = {"policy": {f"layer.{number}.weight": torch.ones(3, 2) for number in range(500)}}
    dcp.save(tensors, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    found = {"policy": {name: torch.zeros(3, 2) for name in tensors["policy"]}}
    distcp.load(found, tmp_path / "checkpoint", alone=True)
    assert all(one.eq(1).all() for one in found["policy"].values())
