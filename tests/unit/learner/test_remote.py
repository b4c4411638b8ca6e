"""Copies of checkpoints at an address: whole ones, kept ones, and a store that refuses."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import copied, written

from streamppo import durable
from streamppo.commands.checks import machine as checks
from streamppo.config.sections import Checkpoint, Config
from streamppo.errors import CheckpointError, ConfigError
from streamppo.learner.checkpoint import manifest, remote
from streamppo.learner.checkpoint.manifest import DamagedFile
from streamppo.learner.checkpoint.remote import CheckpointStore, Copier
from streamppo.weights import store
from streamppo.weights.store import Store

KEPT = ("checkpoint.keep=2", "checkpoint.keep_every=10")


@pytest.fixture
def copies(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(f"file://{tmp_path}/store/math-1")


# --- the store --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_folders_and_files_come_back_as_they_went(tmp_path: Path, kind: str) -> None:
    there = Store(f"{kind}://{tmp_path}/of-{kind}")
    assert there.names() == there.names("model") == []
    (tmp_path / "model").mkdir()
    for number in range(3):
        (tmp_path / "model" / f"part-{number}").write_bytes(bytes([number]) * 1000)
    there.put_folder("model", tmp_path / "model")
    assert (there.names(), there.names("model")) == (["model"], ["part-0", "part-1", "part-2"])
    there.fetch_folder("model", tmp_path / "other")
    assert {one.name: one.read_bytes() for one in (tmp_path / "other").iterdir()} == {
        one.name: one.read_bytes() for one in (tmp_path / "model").iterdir()
    }
    there.fetch_folder("model", tmp_path / "other")
    assert [one.name for one in tmp_path.iterdir() if one.name.endswith(durable.ASIDE)] == []
    there.delete("model")
    assert there.names() == []


def test_a_store_that_refuses_is_tried_again_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, paused = Store(f"file://{tmp_path}/store"), list[float]()
    refusals = [True, True, False]

    def opened(*arguments: Any, **words: Any) -> Any:
        if refusals.pop(0):
            raise ConnectionResetError("the network is away")
        return open_(*arguments, **words)

    open_ = there._files.open
    monkeypatch.setattr(there._files, "open", opened)
    monkeypatch.setattr(store.time, "sleep", paused.append)
    there.put("00000001", {"a": io.BytesIO(b"whole")})
    assert (tmp_path / "store" / "00000001" / "a").read_bytes() == b"whole"
    assert paused == [1.0, 10.0]
    refusals[:] = [True] * 9
    with pytest.raises(CheckpointError, match=r"store: ConnectionResetError: the network is away"):
        there.put("00000002", {"a": io.BytesIO(b"whole")})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["a pipe", "a device without end"])
def test_nobody_waits_at_an_address_for_what_is_no_file(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "store" / "00000001" / "manifest.json"
    place.parent.mkdir(parents=True)
    os.mkfifo(place) if kind == "a pipe" else place.symlink_to("/dev/zero")
    there = Store(f"file://{tmp_path}/store")
    for look in (lambda: there.read("00000001", place.name), lambda: there.fetch_folder("00000001", tmp_path / "to")):
        with pytest.raises(CheckpointError, match=r"store: .*not a file"):
            look()


def test_a_store_whose_package_is_not_here_says_which() -> None:
    with pytest.raises(CheckpointError, match=r"gs://bucket/run: ImportError: .*gcsfs"):
        Store("gs://bucket/run")


def test_s3_takes_gives_and_forgets_copies_and_says_when_it_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs packages that `[test]` does not bring: s3fs and moto[server]."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    pytest.importorskip("boto3").client("s3").create_bucket(Bucket="bucket")
    copies = CheckpointStore("s3://bucket/runs/math-1")
    copies.check_access()
    for version in (5, 10, 15):
        path = written(tmp_path, version)
        copied(copies, path, *(one.name for one in path.iterdir()))
    copies.drop(Checkpoint(keep=2))
    assert copies.versions() == [10, 15] and copies.names("00000005") == []
    there = tmp_path / "another" / "00000015"
    assert manifest.verify(there, 1, None, copies.fetch).version == 15
    server.stop()
    with pytest.raises(CheckpointError, match=r"s3://bucket/runs/math-1: \w+Error"):
        copies.versions()


# --- copies -----------------------------------------------------------------------------------------------------


def test_a_copy_is_whole_when_every_file_has_come_in_whichever_order(tmp_path: Path, copies: CheckpointStore) -> None:
    path = written(tmp_path, 5)
    assert copies.versions() == []
    for name in (manifest.MANIFEST, "__1_0.distcp", ".metadata"):
        copied(copies, path, name)
        assert copies.versions() == []
    copied(copies, path, "__0_0.distcp")
    assert copies.versions() == [5]
    (tmp_path / "store" / "math-1" / path.name / manifest.MANIFEST).write_bytes(b"{")
    assert copies.versions() == []


def test_the_newest_is_taken_from_the_disk_and_else_from_the_address(tmp_path: Path, copies: CheckpointStore) -> None:
    here = tmp_path / "checkpoints"
    for version in (5, 10, 15):
        path = written(here, version)
        copied(copies, path, *(one.name for one in path.iterdir()))
    for gone in (10, 15):
        shutil.rmtree(here / f"{gone:08d}")
    assert remote.newest(here, "", 99) == here / "00000005"
    assert remote.newest(here, copies.address, 99) == here / "00000015"
    assert remote.newest(here, copies.address, 12) == here / "00000010"
    assert remote.newest(here, copies.address, 5) == here / "00000005"
    assert remote.newest(here, copies.address, 4) is None
    assert remote.newest(here, "gs://bucket/run", 99) == here / "00000005", "a store that is away ends nothing"
    with pytest.raises(CheckpointError, match="gs://bucket/run"):
        remote.newest(tmp_path / "empty", "gs://bucket/run", 99)


def test_a_rank_fetches_what_it_lacks_and_what_is_damaged_and_verifies_it(
    tmp_path: Path, copies: CheckpointStore
) -> None:
    path = written(tmp_path / "one", 5)
    copied(copies, path, *(one.name for one in path.iterdir()))
    there = tmp_path / "another" / path.name
    with pytest.raises(CheckpointError, match="missing on the disk of rank 1"):
        manifest.verify(there, 1)
    assert manifest.verify(there, 1, None, copies.fetch).version == 5
    assert sorted(one.name for one in there.iterdir()) == [".metadata", "__1_0.distcp", manifest.MANIFEST]
    (there / "__1_0.distcp").write_bytes(b"damaged")
    assert manifest.verify(there, 1, None, copies.fetch).version == 5
    assert (there / "__1_0.distcp").read_bytes() == (path / "__1_0.distcp").read_bytes()
    (tmp_path / "store" / "math-1" / path.name / "__0_0.distcp").write_bytes(b"torn")
    with pytest.raises(DamagedFile, match=r"__0_0.distcp: damaged"):
        manifest.verify(there, 0, None, copies.fetch)


def test_copies_that_are_not_kept_go_and_so_do_parts_of_older_ones(
    tmp_path: Path, copies: CheckpointStore, math_config: Any
) -> None:
    for version in (8, 10, 12, 14, 16):
        path = written(tmp_path, version)
        copied(copies, path, *(one.name for one in path.iterdir() if version != 12 or "__1" not in one.name))
    copied(copies, written(tmp_path, 18), ".metadata")
    copies.drop(math_config(*KEPT).checkpoint)
    assert copies.names() == [f"{version:08d}" for version in (10, 14, 16, 18)]


def test_a_copier_goes_on_where_the_disk_forgets_and_a_store_that_is_away_ends_nothing(
    tmp_path: Path,
    math_config: Callable[..., Config],
    logged: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "PAUSES_S", ())
    given = f"checkpoint.remote=file://{tmp_path}/store"
    copier, path = Copier(math_config(given).checkpoint), written(tmp_path, 5, ranks=1)
    files = {one.name: one.open("rb") for one in path.iterdir()}
    for one in path.iterdir():
        one.unlink()
    copier.start(path, files, prunes=True)
    copier.wait()
    assert not copier.is_busy and all(file.closed for file in files.values())
    assert copier.remote is not None and copier.remote.versions() == [5]
    monkeypatch.setattr(copier.remote._files, "makedirs", _away)
    copier.start(tmp_path / "00000006", {"a": io.BytesIO(b"a")}, prunes=True)
    copier.wait()
    assert f"checkpoint 00000006 was not copied: file://{tmp_path}/store: TimeoutError: away" in logged.text


def _away(*_: object, **__: object) -> None:
    raise TimeoutError("away")


def test_check_says_if_an_address_takes_files(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    assert list(checks.copies(math_config())) == []
    (found,) = checks.copies(math_config(f"checkpoint.remote=file://{tmp_path}/store"))
    assert (found.subject, found.state) == ("copies", "ok") and Store(f"file://{tmp_path}/store").names() == []
    (tmp_path / "file").write_text("no folder")
    (found,) = checks.copies(math_config(f"checkpoint.remote=file://{tmp_path}/file/store"))
    assert found.state == "error" and f"checkpoint.remote: file://{tmp_path}/file/store: NotADirectory" in found.text


# --- a run and its address ---------------------------------------------------------------------------------------


def test_a_run_has_an_address_of_its_own_and_keeps_it(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    config = math_config("checkpoint.remote=s3://bucket/runs/")
    first, other = tmp_path / "first" / "math", tmp_path / "other" / "math"
    for folder in (first, other):
        folder.mkdir(parents=True)
    address = remote.address_of(config, first)
    assert address.startswith("s3://bucket/runs/math-") and remote.address_of(config, first) == address
    assert remote.address_of(config, other) != address, "two runs of one name in one bucket"
    assert remote.known_address(first) == address == remote.config_for_actors(config, first).checkpoint.remote
    assert remote.address_of(math_config(), first) == "" == remote.known_address(tmp_path)
    moved = math_config("checkpoint.remote=gs://another")
    assert remote.address_of(moved, first).startswith("gs://another/math-")


def test_nodes_with_disks_of_their_own_need_an_address(math_config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"cluster.own_disks needs checkpoint.remote"):
        math_config("cluster.own_disks=true")


def test_a_node_fetches_the_model_that_the_run_has_made(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    given = (f"checkpoint.remote=file://{tmp_path}/store", "cluster.own_disks=true")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    there, path = Store(f"file://{tmp_path}/store"), tmp_path / "node" / "model"
    store.bring_model(math_config(*given), str(path))
    assert not path.exists(), "nothing was made yet"
    there.put_folder(store.MODEL, tmp_path / "model")
    store.bring_model(math_config(given[0]), str(path))
    assert not path.exists(), "all see one folder"
    store.bring_model(math_config(*given), str(path))
    assert (path / "config.json").read_text() == "{}"


@pytest.mark.parametrize("address", ["reference::file:///there", "simplecache::s3://bucket/there"])
def test_an_address_inside_of_another_one_is_refused(address: str) -> None:
    with pytest.raises(CheckpointError, match="a file system inside another one"):
        Store(address)
