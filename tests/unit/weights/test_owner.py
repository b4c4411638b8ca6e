"""An address belongs to one folder: a copy of a run notices it, in any order and any place."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from checkpoint_files import copied, written

from streamppo.config.sections import Config
from streamppo.driver import preflight
from streamppo.errors import CheckpointError
from streamppo.learner.checkpoint import remote
from streamppo.learner.checkpoint.remote import CheckpointStore
from streamppo.weights import owner, store
from streamppo.weights.store import Store

Load = Callable[..., Config]


@pytest.fixture(params=["store", "my own copies"])
def under(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return f"file://{tmp_path}/{request.param}"


@pytest.fixture
def config(math_config: Load, under: str) -> Config:
    return math_config(f'checkpoint.remote="{under}"')


@pytest.fixture
def run(tmp_path: Path, under: str) -> Path:
    folder = tmp_path / "runs" / ("math copy" if " " in under else "math")
    folder.mkdir(parents=True)
    return folder


def copy_of(run: Path, name: str = "copy") -> Path:
    return Path(shutil.copytree(run, run.with_name(name)))


def test_a_run_keeps_its_address_over_any_number_of_drivers(config: Config, run: Path) -> None:
    addresses = {remote.address_of(config, run) for _ in range(9)}
    assert len(addresses) == 1
    assert len(Store(addresses.pop()).names(owner.OWNERS)) == 1, "claims that came before are gone"


def test_what_stores_and_file_browsers_leave_among_the_claims_is_no_claim(config: Config, run: Path) -> None:
    address = remote.address_of(config, run)
    folder = Path(address.removeprefix("file://")) / owner.OWNERS
    for name in (".DS_Store", owner.OWNERS, "00000009-notes"):
        (folder / name).touch()
    assert remote.address_of(config, run) == address
    assert owner.owns(owner.claims_among(Store(address).names(owner.OWNERS)), run)


def test_a_copy_gets_an_address_of_its_own_and_the_first_one_keeps_its_own(
    config: Config, run: Path, logged: pytest.LogCaptureFixture
) -> None:
    first = remote.address_of(config, run)
    copy = copy_of(run)
    second = remote.address_of(config, copy)
    assert second != first and f"{copy}: a copy of the run in {run}, whose address is {first}" in logged.text
    assert remote.address_of(config, run) == first and remote.address_of(config, copy) == second


def moved(run: Path) -> Path:
    return run.rename(run.with_name("moved"))


def put_back(run: Path) -> Path:
    """As from a backup: another inode at the same place."""
    backup = copy_of(run, "backup")
    shutil.rmtree(run)
    return Path(shutil.copytree(backup, run))


@pytest.mark.parametrize("how", [moved, put_back])
def test_a_run_that_is_moved_or_put_back_keeps_its_address(
    config: Config, run: Path, how: Callable[[Path], Path]
) -> None:
    first = remote.address_of(config, run)
    again = how(run)
    assert [remote.address_of(config, again) for _ in range(3)] == [first] * 3


def test_a_folder_that_was_put_back_after_another_driver_began_is_a_copy(config: Config, run: Path) -> None:
    """It is at the same place, as in another container, and cannot be told by that."""
    first = remote.address_of(config, run)
    backup = copy_of(run, "backup")
    remote.address_of(config, run)
    shutil.rmtree(run)
    shutil.copytree(backup, run)
    assert remote.address_of(config, run) != first


def test_a_folder_whose_journal_does_not_know_what_is_at_the_address_is_a_copy(
    config: Config, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = remote.address_of(config, run)
    path = written(tmp_path / "there", 200)
    copied(CheckpointStore(first), path, *(one.name for one in path.iterdir()))
    assert remote.address_of(config, run) == first, "without a journal nothing is known"
    past = remote.history.History({0: config}, {100: "d"})
    monkeypatch.setattr(remote.history, "read_history", lambda *_: past)
    assert "has checkpoints of another run, of version 200" in remote.belongs_to(config, run)
    assert remote.address_of(config, run) != first


def test_where_nodes_read_from_the_address_a_copy_is_refused_with_what_to_do(
    math_config: Load, under: str, run: Path
) -> None:
    config = math_config(f"checkpoint.remote={under}", "cluster.own_disks=true")
    first = remote.address_of(config, run)
    copy = copy_of(run)
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(CheckpointError, match=f"a copy of the run in {run}.* delete {copy}/remote.address"):
        preflight.verify(config, copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
    preflight.verify(config, run)
    (copy / "remote.address").unlink()
    preflight.verify(config, copy)
    assert remote.address_of(config, copy) != first


class Dead(BaseException):
    """The process is killed."""


def test_a_death_at_any_write_of_a_claim_leaves_the_address_to_its_run(
    config: Config, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = remote.address_of(config, run)
    write, put, delete = owner.write, Store.put, Store.delete
    for step in range(4):
        for dies in ("write", "put", "torn", "delete"):

            def dying(*given: Any, dies: str = dies) -> None:
                if dies == "torn":
                    place, files = given[1], given[2]
                    put(given[0], place, {name: io.BytesIO(file.read(5)) for name, file in files.items()})
                raise Dead

            with monkeypatch.context() as patch, pytest.raises(Dead):
                patch.setattr(owner if dies == "write" else Store, "put" if dies == "torn" else dies, dying)
                remote.address_of(config, run)
            if step % 2:
                assert remote.address_of(config, run) == first
    assert (owner.write, Store.put, Store.delete) == (write, put, delete)
    assert remote.address_of(config, run) == first


def test_an_address_that_is_away_keeps_nobody_from_going_on(
    config: Config, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = remote.address_of(config, run)

    def away(*_: object) -> list[str]:
        raise CheckpointError("away")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "names", away)
        assert [remote.address_of(config, run) for _ in range(9)] == [first] * 9
    assert remote.address_of(config, run) == first


def test_a_replay_claims_nothing(config: Config, run: Path) -> None:
    assert remote.at_rest(config, run).checkpoint.remote == "" and list(run.iterdir()) == []
    first = remote.address_of(config, run)
    before = (run / "remote.address").read_bytes()
    assert remote.at_rest(config, run).checkpoint.remote == first
    assert (run / "remote.address").read_bytes() == before


def test_what_a_folder_gets_is_whole_or_not_there(under: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that dies in between leaves what was there before."""
    found = Store(under)
    found.put("run", {"config.toml": io.BytesIO(b"first")})

    def dying(source: BinaryIO, to: BinaryIO, length: int) -> None:
        to.write(source.read(2))
        raise Dead

    with monkeypatch.context() as patch, pytest.raises(Dead):
        patch.setattr(store.shutil, "copyfileobj", dying)
        found.put("run", {"config.toml": io.BytesIO(b"second")})
    assert found.read("run", "config.toml") == b"first" and found.names("run") == ["config.toml"]
