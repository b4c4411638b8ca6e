"""The copy of journal, shards and archive has everything acknowledged, and restores the run's folder."""

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import fsspec
import msgspec
import pytest
import shard_case
from test_queue_actor import COPIED, SMALL, as_it_is, deliver, push, sample

from streamppo.config import consent
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import CheckpointError, ConfigError, JournalError
from streamppo.queue.actor import QueueActor
from streamppo.queue.replication import copies, standby
from streamppo.queue.restore import restore
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.queue.store.trajectory_store import TrajectoryStore, path
from streamppo.types import Batch, Failure, Trajectory, decode, encode
from streamppo.weights import owner
from streamppo.weights.store import Store, with_crc

OTHERS = bytes([7, 0, 0, 0, 8, 0, 0, 0])
"""Tokens that no other sample has."""
ROWS = (
    "counters",
    "slots",
    "leases",
    "versions",
    "configs",
    "ended_attempts",
    "dead_letters",
    "skipped",
    "known_rows",
)


@pytest.fixture
def address() -> str:
    """An address where nothing is."""
    return f"memory://copies/{uuid4().hex}"


@pytest.fixture(params=[1, 2])
def shards(request: pytest.FixtureRequest) -> int:
    """The shards of the queue; one is none."""
    return request.param


@pytest.fixture
def queue_in(math_config: Callable[..., Config], address: str, shards: int) -> Callable[..., QueueActor]:
    """Starts a queue of the run in a folder, and its shards, with a copy at the address."""

    def make(run: Path, *overrides: str) -> QueueActor:
        run.mkdir(exist_ok=True)
        (run / "config.json").write_text('{"vocab_size": 17}')
        (run / "config.toml").write_text("# a run")
        (run / "remote.address").write_text(address)
        config = msgspec.msgpack.encode(math_config(*SMALL, *COPIED, f"queue.shards={shards}", *overrides))
        actors = shard_case.shards(config, run, as_it_is)
        return QueueActor(config, str(run), str(run), put=as_it_is, shards=lambda _: actors)

    return make


def rows(run: Path) -> dict[str, Any]:
    """All that the journal of a run says, and the trajectories of which it has records alone."""
    journal = Journal.open_run(run)
    found = {name: getattr(journal, name)() for name in ROWS}
    journal.close()
    held = [slot.identity for slot in found["slots"] if slot.record]
    found["trajectories"] = [one for number in range(2) for one in trajectories(run, number) if one.identity in held]
    assert len(found["trajectories"]) == len(held)
    return found


def trajectories(run: Path, number: int) -> list[Trajectory]:
    """All that the journal of a shard has; nothing if there is none."""
    if not path(run, number).is_file():
        return []
    shard = TrajectoryStore(run, number)
    found = [decode(row, Trajectory) for some in shard.all(9) for row in some.values()]
    shard.close()
    return found


async def until(comes: Callable[[], bool]) -> None:
    """Wait without a signal: the queue does not wait until its shards have dropped tokens."""
    async with asyncio.timeout(20):
        while not comes():
            await asyncio.sleep(0.01)


def shard_files(address: str, life: int = 0) -> list[str]:
    """The copies that shards have."""
    found = Store(address)
    return [f"{number}/{name}" for number in range(2) for name in found.names(f"shards/{life:04d}/{number}")]


def batches(run: Path) -> list[Batch]:
    """All batches in the archive of a run."""
    found = archive.open(run)
    return [found.batch(version) for version in found.versions()]


async def train(actor: QueueActor, versions: range, after: Callable[[], None] = lambda: None) -> None:
    """Make these versions, with a failure in each; calls `after` whenever the queue has acknowledged something."""
    calls = count(1000 * versions.start)
    for version in versions:
        made = await sample(actor, next(calls), 4, version)
        failed, made = made[0], made[1:]
        after()
        failure = Failure(identity=failed.identity, actor="a", stage="reward", reason="no", tokens=2)
        await actor.deliver("a", version, await shard_case.given(actor, made), encode((failure,)))
        after()
        rest = await sample(actor, next(calls), 1, version)
        after()
        await deliver(actor, rest)
        after()
        await actor.take(version)
        after()
        await actor.publish(push(version + 1), [], b"", 0)
        after()


async def begun(actor: QueueActor) -> QueueActor:
    """A queue with version 0."""
    await actor.begin(0)
    await actor.publish(push(0), [], b"", 0)
    return actor


def test_a_run_is_restored_as_it_was_acknowledged_at_every_moment(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path
) -> None:
    run, number = tmp_path / "run", count()

    def compare() -> None:
        again = tmp_path / f"again-{next(number)}"
        restore(address, again)
        assert rows(again) == rows(run)
        assert batches(again) == batches(run)
        assert (again / "config.toml").read_text() == "# a run"
        assert (again / "model" / "config.json").read_bytes() == b"of a model", "which a resumed run knows"

    Store(address).put("model", {"config.json": BytesIO(b"of a model")})

    async def main() -> None:
        actor = await begun(queue_in(run))
        compare()
        await train(actor, range(3), compare)
        await actor.forget(2)
        compare()
        assert archive.open(run).versions() == [2], "the dropped ones are gone, here and there"
        # Another process of the queue copies all of it anew.
        await train(queue_in(run), range(3, 5), compare)

    asyncio.run(main())


def test_the_restored_run_goes_on_and_the_first_one_makes_no_version_any_more(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))

    async def main() -> None:
        lost = await begun(queue_in(first))
        await train(lost, range(2))
        waits = await sample(lost, 1900, 2, 2)
        restore(address, second)
        actor = queue_in(second)
        await actor.begin(2)
        assert await sample(actor, 1901, 2, 2) != waits, "nobody samples for it any more"
        await actor.publish(push(2), [], b"", 0)
        await train(actor, range(2, 3))
        late = [*waits, *await sample(lost, 1902, 2, 2)]
        await deliver(lost, [msgspec.structs.replace(one, tokens=OTHERS) for one in late])
        await lost.take(2)
        with pytest.raises(JournalError, match=r"continues in another folder, restored from .* and ends in this one"):
            await lost.publish(push(3), [], b"", 0)
        with pytest.raises(JournalError, match="continues in another folder"):
            queue_in(first)
        restore(address, third)
        assert rows(third) == rows(second)
        assert OTHERS not in [one.tokens for number in range(2) for one in trajectories(third, number)]

    asyncio.run(main())


@pytest.mark.slow
def test_a_death_at_any_copy_of_a_file_loses_nothing_that_was_acknowledged(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, left = Store.put, count()

    class Dead(BaseException):
        pass

    def dying(store: Store, folder: str, files: dict[str, BinaryIO]) -> None:
        if next(left) == dies_at:
            (name,) = files
            files[name].seek(0)
            # A part of it is there: a folder, unlike an object store, shows a half-written file.
            with fsspec.open(f"{address}/{folder}/{name}", "wb") as file:
                file.write(files[name].read(9))
            raise Dead
        put(store, folder, files)

    monkeypatch.setattr(Store, "put", dying)
    dies_at, deaths = 0, 0
    while True:
        left, run, again = count(), tmp_path / f"run-{dies_at}", tmp_path / f"again-{dies_at}"
        second = tmp_path / f"second-{dies_at}"
        fsspec.filesystem("memory").store.clear()
        known: list[dict[str, Any]] = []

        async def main(run: Path = run, second: Path = second, known: list[dict[str, Any]] = known) -> None:
            actor = queue_in(run)
            await actor.begin(0)
            known.append(rows(run))
            await actor.publish(push(0), [], b"", 0)
            known.append(rows(run))
            await train(actor, range(1), lambda: known.append(rows(run)))
            waits = await sample(actor, 900, 3, 1)
            known.append(rows(run))
            await deliver(actor, waits)
            known.append(rows(run))
            # Its processes start again, and then it continues elsewhere.
            queue_in(run)
            restore(address, second)
            actor = queue_in(second)
            await actor.begin(1)
            known.append(rows(second))
            await actor.publish(push(1), [], b"", 0)
            await train(actor, range(1, 2), lambda: known.append(rows(second)))

        try:
            asyncio.run(main())
            break
        except Dead:
            deaths += 1
        if known:
            monkeypatch.setattr(Store, "put", put)
            restore(address, again)
            monkeypatch.setattr(Store, "put", dying)
            assert rows(again) == known[-1]
            assert len(batches(again)) == max(known[-1]["versions"], default=0)
        dies_at += 1
    assert deaths > 24


def test_a_death_at_any_copy_of_a_file_that_changes_leaves_a_whole_one(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Driver after driver changes config.toml and metrics.jsonl, and dies at a copy, of which a part is there."""
    run, put, left = tmp_path / "run", Store.put, count()

    class Dead(BaseException):
        pass

    def dying(store: Store, folder: str, files: dict[str, BinaryIO]) -> None:
        if next(left) == dies_at:
            (name,) = files
            with fsspec.open(f"{address}/{folder}/{name}", "wb") as file:
                file.write(files[name].read(9))
            raise Dead
        put(store, folder, files)

    asyncio.run(_two_versions(queue_in(run)))
    monkeypatch.setattr(Store, "put", dying)
    for dies_at in range(9):
        left = count()
        # The helper writes its own; each driver here has another one.
        text = f"# driver {dies_at}"
        config = msgspec.msgpack.decode(Journal.open_run(run).configs()[0], type=Config)
        (run / "config.toml").write_text(text)
        (run / "metrics.jsonl").write_text(f"{text}\n" * (dies_at + 1))
        with contextlib.suppress(Dead):
            standby.open_journal(run, config).fence()
        again = tmp_path / f"again-{dies_at}"
        monkeypatch.setattr(Store, "put", put)
        restore(address, again)
        monkeypatch.setattr(Store, "put", dying)
        assert (again / "config.toml").read_text().removeprefix("# ") in [
            "a run",
            *(f"driver {number}" for number in range(dies_at + 1)),
        ]
        metrics = (again / "metrics.jsonl").read_text() if (again / "metrics.jsonl").exists() else ""
        assert metrics == "" or len(metrics.splitlines()) == int(metrics.split()[2]) + 1
        assert rows(again) == rows(run)
    assert (again / "config.toml").read_text() == f"# driver {dies_at}", "no put was left to die at"


def test_a_configuration_that_the_copy_lacks_comes_from_the_journal(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, math_config: Callable[..., Config], shards: int
) -> None:
    asyncio.run(_two_versions(queue_in(tmp_path / "run")))
    for name in Store(address).names("run/0000"):
        fsspec.filesystem("memory").pipe(f"{address}/run/0000/{name}", b"")
    restore(address, tmp_path / "again")
    config = configfile.load(tmp_path / "again" / "config.toml")
    assert config == math_config(*SMALL, *COPIED, f"queue.shards={shards}")
    assert not (tmp_path / "again" / "metrics.jsonl").exists()


def test_a_restore_that_dies_at_any_read_leaves_nothing_half_made(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead(BaseException):
        pass

    asyncio.run(_two_versions(queue_in(tmp_path / "run")))
    fetch, read, left = Store.fetch, Store.read, count()

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any) -> Any:
            if next(left) == dies_at:
                raise Dead
            return call(*given)

        return made

    for dies_at in count():
        left, again = count(), tmp_path / f"again-{dies_at}"
        with monkeypatch.context() as patch:
            patch.setattr(Store, "fetch", dying(fetch))
            patch.setattr(Store, "read", dying(read))
            try:
                restore(address, again)
                break
            except Dead:
                assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert dies_at > 5
    assert rows(again) == rows(tmp_path / "run")


def test_batches_from_before_there_was_a_copy_and_half_copies_of_them_are_copied(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    asyncio.run(_two_versions(queue_in(run)))
    first, *_ = Store(address).names("archive")
    found = fsspec.filesystem("memory")
    found.pipe(f"{address}/archive/{first}", found.cat_file(f"{address}/archive/{first}")[:99])
    for other in Store(address).names("archive")[1:]:
        Store(address).delete(f"archive/{other}")
    queue_in(run)
    restore(address, tmp_path / "again")
    assert batches(tmp_path / "again") == batches(run)


def test_of_two_folders_that_go_on_with_one_address_the_later_one_has_it(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path
) -> None:
    """Copies at one place, as in two containers: neither is told by its folder, and nothing of the two is mixed."""
    first, second = tmp_path / "first", tmp_path / "second"

    async def main() -> None:
        one = queue_in(first)
        owner.claim(Store(address), first)
        await train(await begun(one), range(1))
        shutil.copytree(first, second)
        owner.claim(Store(address), second)
        with pytest.raises(JournalError, match="continues in another folder"):
            await train(one, range(1, 2))
        with pytest.raises(JournalError, match="ends in this one"):
            standby.open_journal(first, one.config).fence()
        standby.open_journal(second, one.config).fence()

    asyncio.run(main())
    restore(address, tmp_path / "again")
    assert rows(tmp_path / "again") == rows(second)


def test_of_two_folders_restored_of_one_copy_the_first_driver_goes_on(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    asyncio.run(_two_versions(queue_in(run)))
    owner.claim(Store(address), run)
    again, other = tmp_path / "again", tmp_path / "other"
    for folder in (again, other):
        restore(address, folder)
        assert owner.other_owner(Store(address), folder) == "", "it may begin anywhere"
    assert copies.life(again) != copies.life(other), "and nothing of the two is mixed"
    owner.claim(Store(address), again)
    assert owner.other_owner(Store(address), again) == ""
    for folder in (run, other):
        assert f"another copy of this run continues in {again}" in owner.other_owner(Store(address), folder)


def test_a_copy_that_is_damaged_or_has_a_gap_is_named_and_a_torn_base_is_left_for_the_one_before(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path
) -> None:
    asyncio.run(_two_versions(queue_in(tmp_path / "run")))
    found, folder = Store(address), "journal/0000"
    files = fsspec.filesystem("memory")
    names = found.names(folder)
    restore(address, tmp_path / "whole")
    files.pipe(f"{address}/{folder}/{int(names[-1]) + 1:012d}-00000000.base", b"torn")
    restore(address, tmp_path / "again")
    assert rows(tmp_path / "again") == rows(tmp_path / "whole")
    content = found.read(folder, names[-2])
    files.pipe(f"{address}/{folder}/{names[-2]}", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(JournalError, match=f"{names[-2]}: damaged, and transactions follow"):
        restore(address, tmp_path / "damaged")
    found.delete(f"{folder}/{names[-2]}")
    with pytest.raises(JournalError, match=f"transaction {int(names[-2])} is missing"):
        restore(address, tmp_path / "gap")
    assert not (tmp_path / "damaged").exists() and not (tmp_path / "gap").exists()


async def _two_versions(actor: QueueActor) -> None:
    await train(await begun(actor), range(2))


def test_now_and_then_a_whole_journal_takes_the_place_of_transactions(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "BASE_EVERY", 3)
    asyncio.run(_two_versions(queue_in(tmp_path / "run")))
    names = Store(address).names("journal/0000")
    assert len(names) <= 3 and names[0].endswith(".base")
    restore(address, tmp_path / "again")
    assert rows(tmp_path / "again") == rows(tmp_path / "run")


def test_a_needless_copy_that_cannot_be_deleted_keeps_nobody_waiting(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(store: Store, folder: str) -> None:
        raise CheckpointError("gone already")

    monkeypatch.setattr(standby, "BASE_EVERY", 3)
    monkeypatch.setattr(Store, "delete", refuses)

    async def main() -> None:
        actor = queue_in(tmp_path / "run")
        await _two_versions(actor)
        await actor.forget(1)

    asyncio.run(main())
    restore(address, tmp_path / "again")
    assert rows(tmp_path / "again") == rows(tmp_path / "run")


def test_a_store_that_is_away_is_waited_for_and_nothing_is_acknowledged_meanwhile(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "RETRY_S", 0.01)
    put, is_away = Store.put, False

    def away(store: Store, folder: str, files: dict[str, BinaryIO]) -> None:
        if is_away:
            raise CheckpointError("away")
        put(store, folder, files)

    async def main() -> None:
        nonlocal is_away
        actor = await begun(queue_in(tmp_path / "run"))
        made = await sample(actor, 0, 1)
        monkeypatch.setattr(Store, "put", away)
        is_away = True
        waits = asyncio.create_task(actor.issue("a", 0, 2, 1))
        stored = [asyncio.create_task(actor._shards.store(made))] if actor._shards else []
        await asyncio.wait([waits, *stored], timeout=0.3)
        assert not any(one.done() for one in (waits, *stored))
        is_away = False
        assert len(await waits) > 10 and [len(await one) for one in stored] in ([], [1])
        restore(address, tmp_path / "again")
        assert rows(tmp_path / "again") == rows(tmp_path / "run")

    asyncio.run(main())


def test_an_address_without_a_copy_and_a_folder_that_is_there_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no copy of a journal: only a run with queue\.standby"):
        restore(address, tmp_path / "new")
    with pytest.raises(CheckpointError, match="exists; name a new folder"):
        restore(address, tmp_path)


def test_a_run_that_is_restored_by_the_user_who_made_it_needs_no_consent(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = queue_in(tmp_path / "run")
    config = configfile.change(actor.config, ["cluster.address=10.0.0.1:6379"])
    consent.give(tmp_path / "run", config)
    asyncio.run(_two_versions(actor))
    restore(address, tmp_path / "new")
    consent.require(tmp_path / "new", [config])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    with pytest.raises(ConfigError, match="--trust"):
        consent.require(tmp_path / "new", [config])


def test_a_copy_by_an_earlier_version_is_refused_in_a_sentence(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path
) -> None:
    asyncio.run(_two_versions(queue_in(tmp_path / "run")))
    files = fsspec.filesystem("memory")
    for name in Store(address).names("run/0000"):
        files.mv(f"{address}/run/0000/{name}", f"{address}/run/{name.rpartition('.')[0]}")
    with pytest.raises(CheckpointError, match=r"run/config\.toml: a copy by an earlier version of streamppo"):
        restore(address, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [".DS_Store", "0000", "notes.txt", "000000000001x"])
def test_files_of_somebody_else_at_the_address_harm_nobody(
    name: str, queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "BASE_EVERY", 2)
    files = fsspec.filesystem("memory")
    if name[:4] != "0000":
        files.pipe(f"{address}/lives/{name}", b"x")
    files.pipe(f"{address}/journal/0000/{name}", b"x")
    asyncio.run(_two_versions(queue_in(tmp_path / "run")))
    restore(address, tmp_path / "new")
    assert rows(tmp_path / "new") == rows(tmp_path / "run")


@pytest.mark.parametrize("row", [b"\x93", b"\xc1", b"\x91" * 100_000, b"\x80", b"\x81\xa1\xb4\xc0"])
def test_a_copy_that_is_whole_and_strange_is_named(
    row: bytes, queue_in: Callable[..., QueueActor], address: str, tmp_path: Path
) -> None:
    asyncio.run(_two_versions(queue_in(tmp_path / "run")))
    name = Store(address).names("journal/0000")[-1]
    fsspec.filesystem("memory").pipe(f"{address}/journal/0000/{name}", with_crc(row))
    with pytest.raises(JournalError, match=f"{name}: not as this version of streamppo writes it"):
        restore(address, tmp_path / "new")


def test_a_copy_wants_disks_of_their_own(math_config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"queue\.standby needs cluster\.own_disks"):
        math_config("queue.standby=true")


# --- shards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [2])
def test_the_copy_of_a_transaction_of_a_shard_goes_with_its_last_trajectory(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, delete, refused = tmp_path / "run", Store.delete, list[str]()

    def refuses(store: Store, folder: str) -> None:
        refused.append(folder)
        raise CheckpointError("away")

    async def main() -> None:
        actor = await begun(queue_in(run))
        made = await sample(actor, 0, 5)
        # One transaction of each shard.
        await deliver(actor, made)
        first, _ = before = shard_files(address)
        await actor.take(0)
        monkeypatch.setattr(Store, "delete", refuses)
        await actor.publish(push(1), [], b"", 0)
        await until(lambda: bool(refused))
        assert len(refused) == 1, "one of the two has nothing that is needed"
        assert shard_files(address) == before
        monkeypatch.setattr(Store, "delete", delete)
        # It is tried again with the next one, and the other one goes with its last trajectory.
        await deliver(actor, await sample(actor, 1, 3, 1))
        restore(address, tmp_path / "again")
        assert rows(tmp_path / "again") == rows(run)
        assert first in shard_files(address)
        await actor.take(1)
        await actor.publish(push(2), [], b"", 0)
        await until(lambda: shard_files(address) == [])
        await train(actor, range(2, 6))
        await until(lambda: len(shard_files(address)) <= 2)

    asyncio.run(main())


@pytest.mark.parametrize("shards", [2])
def test_a_shard_that_starts_again_copies_all_that_it_has_in_the_place_of_what_was_there(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "TRAJECTORIES_PER_FILE", 2)
    run = tmp_path / "run"

    async def main() -> None:
        actor = await begun(queue_in(run))
        for one in await sample(actor, 0, 7):
            await deliver(actor, [one])
        before = shard_files(address)
        assert len(before) == 7
        queue_in(run)
        after = shard_files(address)
        assert len(after) == 4 and not set(before) & set(after)

    asyncio.run(main())
    restore(address, tmp_path / "again")
    assert rows(tmp_path / "again") == rows(run)


@pytest.mark.parametrize("shards", [2])
def test_a_record_without_its_trajectory_is_no_copy_of_a_run(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path
) -> None:
    async def main() -> None:
        actor = await begun(queue_in(tmp_path / "run"))
        await deliver(actor, await sample(actor, 0, 2))

    asyncio.run(main())
    (_, second) = shard_files(address)
    fsspec.filesystem("memory").pipe(f"{address}/shards/0000/{second}", b"torn")
    with pytest.raises(JournalError, match=r"shards/1\.sqlite: the queue has the record of .* tokens are missing"):
        restore(address, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("shards", [2])
def test_a_copy_that_goes_while_a_run_is_restored_was_needless_and_one_that_cannot_be_read_is_an_error(
    queue_in: Callable[..., QueueActor], address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(_two_versions(queue_in(tmp_path / "run")))
    Store(address).put("shards/0000/1", {"needless": BytesIO(b"")})
    read = Store.read

    def goes(store: Store, folder: str, name: str) -> bytes:
        if name == "needless":
            store.delete(f"{folder}/{name}")
        return read(store, folder, name)

    def refuses(store: Store, folder: str, name: str) -> bytes:
        if folder.startswith("shards"):
            raise CheckpointError("not yours")
        return read(store, folder, name)

    monkeypatch.setattr(Store, "read", refuses)
    with pytest.raises(CheckpointError, match="not yours"):
        restore(address, tmp_path / "refused")
    monkeypatch.setattr(Store, "read", goes)
    restore(address, tmp_path / "again")
    assert rows(tmp_path / "again") == rows(tmp_path / "run")
