"""A run's checkpoint from a stranger: its files are data for `export`, `replay`, `resume` and a rank that loads it.

A stranger writes a manifest that fits the files, so that half of the draws have one.
"""

import os
import pickle
import random
import shutil
from pathlib import Path
from typing import NoReturn

import learner_case as case
import msgspec
import pytest
import test_export
from conftest import COUNTERS
from learner_case import updater
from msgspec import structs
from test_export import checkpointed, model_at
from test_hostile_folders import mutated

from streamppo import cli, loop
from streamppo.commands import replay
from streamppo.config import file as configfile
from streamppo.errors import RunError, StreamppoError
from streamppo.learner.checkpoint import checkpoint, manifest
from streamppo.learner.checkpoint.checkpoint import TrainState
from streamppo.learner.model import optimizer
from streamppo.queue.rules.records import GroupShape
from streamppo.queue.store.journal import Journal

pytestmark = pytest.mark.usefixtures("alone")
BEGUN = "processes would start here"
VERSION = "00000005"
FILES = [".metadata", "__0_0.distcp", "manifest.json"]
COMMANDS = {
    "export": ["export", "RUN", "--to", "TO"],
    "export of a version": ["export", "RUN", "--version", "5", "--to", "TO"],
    "export of another version": ["export", "RUN", "--version", "3", "--to", "TO"],
    "replay": ["replay", "RUN"],
    "fork": ["fork", "RUN", "--at", "5", "--runs", "TO", "--set", "updates=9"],
    "resume": ["resume", "RUN"],
    "resume with changes": ["resume", "RUN", "updates=9"],
    "summary": ["summary", "RUN"],
    "report": ["report", "RUN"],
}


class Planted:
    """A pickle that makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._file,)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made") / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def begun(*_: object, **__: object) -> NoReturn:
        raise RunError(BEGUN)

    monkeypatch.setattr(loop, "ray_session", begun)
    monkeypatch.setattr(replay, "started_ray", begun)
    shape = GroupShape("arithmetic", 2, 1)
    monkeypatch.setattr(test_export, "COUNTERS", structs.replace(COUNTERS, shape=shape))
    if not made.exists():
        (made / "checkpoints").mkdir(parents=True)
        model_at(made / "model", tied=False)
        config = case.config_of(f"model.path={made / 'model'}", "checkpoint.keep=9")
        checkpointed(made, config, (3, 5))
        journal = Journal(made / "journal.sqlite")
        journal.configure(0, msgspec.msgpack.encode(configfile.load(made / configfile.CONFIG)))
        journal.close()
    return shutil.copytree(made, tmp_path / "run")


def sealed(path: Path) -> None:
    """Write the manifest anew, as a stranger would."""
    state = manifest.read(path).state
    files = manifest.CheckpointFiles(
        shared=manifest.flush_and_hash(path, ".metadata"), ranks=(manifest.flush_and_hash(path, "__0_*"),)
    )
    (path / "manifest.json").unlink()
    manifest.write(path, state, files)


def looked_at(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, str]]:
    """The exit code and the output of each command."""
    ends: dict[str, tuple[int, str]] = {}
    for name, words in COMMANDS.items():
        to = run.parent / "to" / name.replace(" ", "-")
        code = cli.main([{"RUN": f"{run}", "TO": f"{to}"}.get(word, word) for word in words])
        said = capsys.readouterr()
        assert "Traceback" not in said.err and (code == 0 or said.err.strip()), (name, said.err)
        ends[name] = code, said.err
    shutil.rmtree(run.parent / "to", ignore_errors=True)
    return ends


def loaded(run: Path) -> str:
    """What a rank that loads the checkpoint says; "" if it takes it."""
    config = configfile.load(run / configfile.CONFIG)
    rank = updater(config, run / "model")
    rank.optimizer = optimizer.adamw(rank.policy, config)
    try:
        checkpoint.load(run / "checkpoints" / VERSION, TrainState(rank.policy, rank.optimizer, None))
    except StreamppoError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_the_whole_checkpoint_is_exported_and_loaded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = looked_at(run, capsys)
    assert [name for name, (code, _) in ends.items() if name.startswith("export") and code] == []
    assert BEGUN in ends["resume with changes"][1]
    sealed(run / "checkpoints" / VERSION)
    assert loaded(run) == ""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_pickle_of_a_stranger_is_not_obeyed(
    run: Path, file: str, is_sealed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / VERSION
    (path / file).write_bytes(pickle.dumps(Planted(run.parent / "obeyed")))
    if is_sealed:
        sealed(path)
    ends = looked_at(run, capsys)
    assert ends["export of a version"][0] and loaded(run)
    assert not (run.parent / "obeyed").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"\0" * 4096, b"{}", b'{"state": 1e999}'])
@pytest.mark.parametrize("file", FILES)
def test_a_file_with_other_content_is_told_in_a_sentence(
    run: Path, file: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints" / VERSION
    (path / file).write_bytes(content)
    if file != "manifest.json":
        sealed(path)
    assert looked_at(run, capsys)["export of a version"][0]
    assert loaded(run)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["a link to itself", "a pipe", "a folder", "nothing"])
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_is_told_in_a_sentence(
    run: Path, file: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run / "checkpoints" / VERSION / file
    place.unlink()
    match kind:
        case "a link to itself":
            place.symlink_to(place)
        case "a pipe":
            os.mkfifo(place)
        case "a folder":
            place.mkdir()
        case _:
            pass
    assert looked_at(run, capsys)["export of a version"][0]
    assert loaded(run)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 100))])
def test_random_mutations_are_taken_or_told_in_a_sentence(
    run: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    path = run / "checkpoints" / VERSION
    file = path / rng.choice(FILES)
    file.write_bytes(mutated(file.read_bytes(), rng))
    if seed % 2 and file.name != "manifest.json":
        sealed(path)
    looked_at(run, capsys)
    loaded(run)
