"""The archive: the very batch comes back, anybody can read it, and no damage goes unnoticed."""

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
import zarr
from conftest import COUNTERS, trajectory
from test_journal import damage
from zarr.storage import ZipStore

from streamppo import durable
from streamppo.errors import JournalError
from streamppo.queue.rules.records import Changes, EndedAttempt, PublishedVersion
from streamppo.queue.store import archive, zarr_zip
from streamppo.queue.store import columns as columns_module
from streamppo.queue.store.archive import Archive
from streamppo.queue.store.journal import Journal
from streamppo.types import Batch, Identity, TokenRecord, ints


def batch(version: int = 3) -> Batch:
    """Ragged, masked, of several attempts, with values that text would not carry."""
    return Batch(
        version=version,
        min_version=version - 1,
        trajectories=(
            trajectory(
                [5, 6, 7], versions=[2, 2, 3], reward=0.1 + 0.2, logprobs=[-1e-30, float("nan"), -0.0], number=2
            ),
            trajectory([9], prompt=[1, 2**31 - 1], finish="length", mask=[True], number=2, sample=1),
            msgspec.structs.replace(
                trajectory([1, 2], mask=[False, True], reward=-1e300),
                identity=Identity(task="other", prompt=2**40, sample=3, attempt=2),
                actor="rollout-1.4",
            ),
        ),
    )


def rewarded(version: int = 3) -> Batch:
    """Rewards of every kind: in one number, on tokens, with partial components; guessed versions."""
    plain, one, two = batch(version).trajectories
    return Batch(
        version=version,
        min_version=version,
        trajectories=(
            msgspec.structs.replace(plain, components={"b": -0.0, "a": 1e-300}, explanation="so-so: 答え\n½"),
            msgspec.structs.replace(one, token_rewards=np.float32([0.25]).tobytes(), components={"a": 2.0}),
            msgspec.structs.replace(two, token_rewards=np.float32([0.0, -1e-30]).tobytes()),
        ),
    )


def cut(version: int = 3) -> Batch:
    """Candidates of every kind: of some trajectories, of some tokens, one or several."""
    plain, one, two = batch(version).trajectories
    columns = {"candidates": np.int32([5, 6, 1, 7, 9]).tobytes(), "candidate_counts": np.int32([2, 0, 3]).tobytes()}
    whole = {"candidate_counts": np.int32([0]).tobytes()}
    return Batch(
        version=version,
        min_version=version,
        trajectories=(msgspec.structs.replace(plain, **columns), msgspec.structs.replace(one, **whole), two),
    )


def taught(version: int = 3) -> Batch:
    """Log-probs of a teacher in two of three trajectories, with bits that text would not carry."""
    plain, one, two = batch(version).trajectories
    columns = [np.float32(column).tobytes() for column in ([-1e-30, -0.0, -7.5], [-0.25])]
    first, second = (
        msgspec.structs.replace(each, teacher_logprobs=column)
        for each, column in zip((plain, one), columns, strict=True)
    )
    return Batch(version=version, min_version=version, trajectories=(first, second, two))


def routed(version: int = 3) -> Batch:
    """Routes of experts in one of three trajectories, some unknown."""
    plain, one, two = batch(version).trajectories
    routes = np.array([0, 300, -1, -1], np.int16).tobytes()
    trajectories = plain, msgspec.structs.replace(one, routes=routes), two
    return Batch(version=version, min_version=version, trajectories=trajectories)


def in_segments(version: int = 3) -> Batch:
    """A segment that others follow, one that comes behind it, and a whole completion."""
    plain, one, two = batch(version).trajectories
    begun = msgspec.structs.replace(plain, finish="cut")
    later = msgspec.structs.replace(one, identity=msgspec.structs.replace(one.identity, segment=7), prefix=2)
    return Batch(version=version, min_version=version, trajectories=(begun, later, two))


def written(made: Archive, one: Batch, learned: TokenRecord | None = None) -> PublishedVersion:
    return PublishedVersion(version=one.version + 1, digest="", archived=made.write(one, learned))


def recorded(run: Path, *batches: Batch, learned: Mapping[int, TokenRecord] = MappingProxyType({})) -> Archive:
    """Written and recorded as the queue does it."""
    journal, made = Journal(run / "journal.sqlite"), Archive(run / "archive", {})
    for one in batches:
        journal.write(Changes(COUNTERS), [written(made, one, learned.get(one.version))], made.settle)
    journal.close()
    return archive.open(run)


def test_the_very_batch_comes_back(tmp_path: Path) -> None:
    batches = [batch(3), rewarded(4), cut(5), taught(6), in_segments(7), routed(8)]
    found = recorded(tmp_path, *batches)
    assert found.versions() == [3, 4, 5, 6, 7, 8]
    assert [found.batch(version) for version in found.versions()] == batches
    assert [found.columns(7)[name].tolist() for name in ("segment", "prefix")] == [[0, 7, 0], [0, 2, 0]]
    assert not {"segment", "prefix"} & found.columns(6).keys()
    assert not {"candidates", "candidate_counts", "teacher_logprobs", "routes"} & found.columns(4).keys()
    assert [row["teacher_logprobs"] for row in found.table(6).to_pylist()] == [
        np.float32([-1e-30, -0.0, -7.5]).tolist(),
        [-0.25],
        [],
    ]
    assert [row["routes"] for row in found.table(8).to_pylist()] == [[], [0, 300, -1, -1], []]
    assert [row["candidates"] for row in found.table(5).to_pylist()] == [[5, 6, 1, 7, 9], [], []]
    assert [row["candidate_counts"] for row in found.table(5).to_pylist()] == [[2, 0, 3], [0], []]
    rows = found.table(4).to_pylist()
    assert [row["token_rewards"] for row in rows] == [[], [0.25], np.float32([0.0, -1e-30]).tolist()]
    assert [row["a"] for row in rows][:2] == [1e-300, 2.0]
    assert [row["explanation"] for row in rows] == ["so-so: 答え\n½", "", ""]
    assert "explanation" not in found.table(3).column_names


def test_what_the_learner_found_lies_beside_the_tokens(tmp_path: Path) -> None:
    values = np.float32([0.5, -0.25, 1e-30, 3.0, 4.0, 5.0])
    learned = TokenRecord(values=values.tobytes(), advantages=(-values).tobytes())
    found = recorded(tmp_path, batch(3), batch(4), learned={4: learned})
    assert found.batch(4).trajectories == batch(3).trajectories, "these numbers are not part of what was trained on"
    assert found.columns(4)["values"].tobytes() == values.tobytes()
    rows = found.table(4).to_pylist()
    assert [row["values"] for row in rows] == [values[:3].tolist(), [3.0], [4.0, 5.0]]
    assert [row["advantages"] for row in rows] == [(-values[:3]).tolist(), [-3.0], [-4.0, -5.0]]
    parts = archive.record_columns(found.columns(4))
    assert list(parts) == ["values", "advantages"]
    assert [part.tolist() for part in parts["advantages"]] == [row["advantages"] for row in rows]
    assert not {"values", "advantages", "proximal_logprobs"} & found.columns(3).keys()
    assert archive.record_columns(found.columns(3)) == {}
    with pytest.raises(AssertionError, match="one number for each token"):
        found.write(batch(5), TokenRecord(advantages=values.tobytes()[4:]))


def test_anybody_reads_it_with_plain_zarr(tmp_path: Path) -> None:
    found = recorded(tmp_path, batch())
    with ZipStore(found.path(3), mode="r") as store:
        group = zarr.open_group(store, mode="r")
        assert group.attrs["version"] == 3
        assert group["tokens"][:].tolist() == [5, 6, 7, 9, 1, 2]  # pyright: ignore
        assert group["offsets"][:].tolist() == [0, 3, 4, 6]  # pyright: ignore
        assert group["reward"][:].tolist() == [0.1 + 0.2, 0.0, -1e300]  # pyright: ignore


def test_columns_and_tables_are_the_same_numbers(tmp_path: Path) -> None:
    found = recorded(tmp_path, batch())
    assert found.columns(3)["tokens"].dtype == np.int32
    table = found.table(3).to_pylist()
    assert [row["tokens"] for row in table] == [ints(row.tokens).tolist() for row in batch().trajectories]
    assert table[1] | {} == {
        **table[1],
        "prompt": 2,
        "sample": 1,
        "finish": "length",
        "actor": "rollout-0",
        "task": "test",
    }


def test_a_file_that_was_not_recorded_does_not_count(tmp_path: Path) -> None:
    recorded(tmp_path, batch(3))
    dead = Archive(tmp_path / "archive", {})
    dead.settle(written(dead, batch(4)))
    found = archive.open(tmp_path)
    assert found.versions() == [3]
    with pytest.raises(JournalError, match=r"00000004.zarr.zip: no batch of version 4 was recorded"):
        found.batch(4)


def test_two_writers_at_a_time_do_not_spoil_each_other_and_what_has_no_name_is_swept_away(tmp_path: Path) -> None:
    one, other = Archive(tmp_path / "archive", {}), Archive(tmp_path / "archive", {})
    ours, theirs = written(other, rewarded(3)), written(one, batch(3))
    other.settle(ours)
    assert other.batch(3) == rewarded(3)
    other.sweep()
    assert [path.name for path in other.folder.iterdir()] == ["00000003.zarr.zip"]
    with pytest.raises(JournalError, match=r"00000003.zarr.zip: cannot be written: .*No such file"):
        one.settle(theirs)
    assert other.batch(3) == rewarded(3)


def test_200_random_flips_and_truncations_are_all_named(tmp_path: Path) -> None:
    found, generator = recorded(tmp_path, batch()), random.Random(3)
    whole = found.path(3).read_bytes()
    for _ in range(200):
        what = damage(found.path(3), generator)
        with pytest.raises(JournalError, match=r"00000003.zarr.zip: damaged"):
            pytest.fail(f"{what} went unnoticed: {found.batch(3)}")
        found.path(3).write_bytes(whole)
    assert found.batch(3) == batch()


@pytest.mark.parametrize("name", sorted({*columns_module.batch_columns(batch(), TokenRecord())[0], "prefix"}))
def test_a_file_without_a_column_is_damaged_though_its_hash_fits(tmp_path: Path, name: str) -> None:
    first, *others = batch().trajectories
    segmented = msgspec.structs.replace(first, finish="cut", prefix=2)
    found = recorded(tmp_path, msgspec.structs.replace(batch(), trajectories=(segmented, *others)))
    with found.path(3).open("rb") as file:
        columns, attributes = zarr_zip.unpack(file)
    del columns[name]
    found.path(3).write_bytes(zarr_zip.pack(columns, msgspec.json.decode(attributes)))
    found.checksums[3] = (durable.sha256(found.path(3)),)
    with pytest.raises(JournalError, match=r"00000003.zarr.zip"):
        found.batch(3)


def test_a_missing_file_and_a_folder_without_a_run_are_named(tmp_path: Path) -> None:
    found = recorded(tmp_path, batch())
    found.path(3).unlink()
    with pytest.raises(JournalError, match=r"00000003.zarr.zip: cannot be read.*copied during the run, copy it again"):
        found.batch(3)
    with pytest.raises(JournalError, match="is not the folder of a run"):
        archive.open(tmp_path / "archive")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("in the way")
    with pytest.raises(JournalError, match=r"00000003.zarr.zip: cannot be written: .*exists"):
        Archive(tmp_path / "archive", {}).write(batch())


def test_batches_that_are_not_kept_are_gone_also_after_a_kill_between_journal_and_files(tmp_path: Path) -> None:
    journal, made = Journal(tmp_path / "journal.sqlite"), Archive(tmp_path / "archive", {})
    journal.fence()
    endings = tuple(
        EndedAttempt(number=number, identity=Identity(task="t", prompt=number, sample=0), state="failed", reason="no")
        for number in (1, 7)
    )
    journal.write(Changes(COUNTERS, ended=endings))
    for version in range(6):
        archived = made.write(Batch(version=version, min_version=0, trajectories=(trajectory([1, version]),)))
        journal.write(
            Changes(COUNTERS), [PublishedVersion(version=version + 1, digest="d", archived=archived)], made.settle
        )
    journal.forget(3, first_slot=5)
    killed = Archive(tmp_path / "archive", archive.checksums(journal.versions().values()))
    assert killed.versions() == [3, 4, 5] and killed.path(2).exists()
    foreign = [".DS_Store", ".ipynb_checkpoints", ".nfs00000000a1b2c3", "0", "notes.txt"]
    (tmp_path / "archive" / foreign[1]).mkdir()
    for name in (*foreign[:1], *foreign[2:]):
        (tmp_path / "archive" / name).touch()
    killed.sweep()
    made.drop(4)
    left = sorted(path.name.removesuffix(".zarr.zip") for path in (tmp_path / "archive").iterdir())
    assert left == sorted([*foreign, "00000004", "00000005"])
    assert [one.number for one in journal.ended_attempts()] == [7]
    assert journal.versions().keys() == {1, 2, 3, 4, 5, 6}, "their digests are known for ever"
    with pytest.raises(JournalError, match="not kept: the archive begins with version 3"):
        killed.batch(1)
