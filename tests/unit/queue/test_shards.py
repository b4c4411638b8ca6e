"""A queue's shards: tokens pass the queue by, and outlive every process until they are archived or given up."""

import asyncio
import random
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import shard_case
from conftest import trajectory
from test_journal import damage
from test_queue_actor import as_it_is, deliver, made_version_0, push, sample, whole

from streamppo.config.sections import Config
from streamppo.errors import JournalError
from streamppo.queue.actor import QueueActor
from streamppo.queue.rules.slot import (
    Slot,
    TrajectoryRecord,
    Unit,
    all_younger,
    count_older,
    make_record,
    newest_version,
)
from streamppo.queue.shards import shard
from streamppo.queue.shards.shard import QueueShard
from streamppo.queue.store import archive, batch_parts
from streamppo.queue.store.journal import Journal
from streamppo.queue.store.trajectory_store import TrajectoryStore, path
from streamppo.types import Batch, Identity, Outline, TokenRecord, Tokens, Trajectory, decode, encode

SHARDS = 3


@pytest.fixture
def config(math_config: Callable[..., Config], tmp_path: Path) -> bytes:
    (tmp_path / "config.json").write_text('{"vocab_size": 500}')
    return encode(math_config("queue.batch_size=8", "queue.samples_per_prompt=1", f"queue.shards={SHARDS}"))


def queue_of(config: bytes, run: Path) -> QueueActor:
    """A queue with shards of its own, as after a start of all processes."""
    shards = shard_case.shards(config, run, as_it_is)
    return QueueActor(config, str(run), str(run), put=as_it_is, shards=lambda _: shards)


def bodies(run: Path) -> list[int]:
    """How many trajectories each shard has."""
    return [sum(map(len, TrajectoryStore(run, number).all(100))) for number in range(SHARDS)]


def told(*, rows: int) -> tuple[list[Trajectory], TokenRecord]:
    """Trajectories of different lengths, with every kind of column, and the learner's numbers of their tokens."""
    generator, made = np.random.default_rng(0), list[Trajectory]()
    for row in range(rows):
        prompt = generator.integers(1, 400, 2 + row % 4).tolist()
        one = trajectory(generator.integers(1, 400, 1 + row % 5).tolist(), prompt=prompt, number=row, reward=row / 7)
        routes = generator.integers(0, 8, (len(prompt) + row % 5, 4), dtype=np.int16).tobytes()
        words = {"explanation": f"because {row}", "components": {"taste": float(row)}, "actor": f"rollout-{row % 2}"}
        made.append(msgspec.structs.replace(one, routes=routes, **words))
    tokens = sum(one.num_tokens for one in made)
    return made, TokenRecord(values=np.arange(tokens, dtype="<f4").tobytes(), advantages=bytes(4 * tokens))


# --- records ---------------------------------------------------------------------------------------------------


def unit_of(one: Trajectory) -> Unit:
    return Unit([Slot(0, one.identity, Unit(), trajectory=one)])


def test_a_record_says_of_ages_what_its_trajectory_says_and_has_none_of_its_columns() -> None:
    generator = random.Random(0)
    for _ in range(200):
        count = generator.randint(1, 12)
        versions = sorted(generator.randint(3, 9) for _ in range(count))
        mask = [generator.random() < 0.7 for _ in range(count - 1)] + [True]
        one = trajectory(range(1, count + 1), versions=versions, mask=mask, reward=0.5)
        record = make_record(one, None)
        for version in range(2, 12):
            assert count_older(record, version) == count_older(one, version)
            sampled = trajectory([1], versions=[one.oldest_version])
            assert all_younger([unit_of(record)], version) == all_younger([unit_of(sampled)], version)
        assert (record.num_tokens, record.num_sampled) == (one.num_tokens, one.num_sampled)
        assert (record.oldest_version, newest_version([record])) == (one.oldest_version, newest_version([one]))
        assert (record.identity, record.reward, record.finish) == (one.identity, one.reward, one.finish)
        assert not any(value for value in msgspec.structs.asdict(record).values() if isinstance(value, bytes))
        assert decode(encode(record), TrajectoryRecord) == record


def test_a_batch_in_parts_is_the_batch_and_one_that_lacks_a_part_is_refused() -> None:
    made, _ = told(rows=9)
    batch = Batch(version=4, min_version=1, trajectories=tuple(made))
    order = np.random.default_rng(1).permutation(9).astype("<i4")
    split = [
        Batch(version=4, min_version=1, rows=rows.tobytes(), trajectories=tuple(made[row] for row in rows))
        for rows in (order[:2], order[2:3], order[3:])
    ]
    assert batch_parts.merge(split) == batch == batch_parts.merge([batch])
    outlines = [decode(encode(batch_parts.make_outline(one)), Outline) for one in split]
    outline = batch_parts.merge_outlines(outlines)
    assert outline == batch_parts.make_outline(batch)
    wanted = [7, 0, 4]
    tokens = [
        one for part in split for one in decode(encode(batch_parts.select_tokens(part, wanted)), tuple[Tokens, ...])
    ]
    assert sorted(one.row for one in tokens) == sorted(wanted)
    assert batch_parts.join(outline, tokens) == batch_parts.join(
        batch_parts.make_outline(batch), batch_parts.select_tokens(batch, wanted)
    )
    with pytest.raises(JournalError, match="lacks rows"):
        batch_parts.merge(split[:2])


# --- what a shard keeps -----------------------------------------------------------------------------------------


def test_what_a_shard_has_acknowledged_is_there_after_a_kill_and_once(config: bytes, tmp_path: Path) -> None:
    made, _ = told(rows=6)

    async def main() -> None:
        first = QueueShard(config, str(tmp_path), str(tmp_path), 0, as_it_is)
        stored = await asyncio.gather(*(first.store(encode((one,))) for one in made), first.store(encode(tuple(made))))
        assert [decode(one, tuple[TrajectoryRecord, ...]) for one in stored[:-1]] == [
            (make_record(one, None),) for one in made
        ]
        another = QueueShard(config, str(tmp_path), str(tmp_path), 0, as_it_is)
        assert sum(map(len, another._bodies.all(100))) == len(made)
        assert another._bodies.read([one.identity for one in made[::-1]]) == made[::-1]

    asyncio.run(main())


def test_a_trajectory_that_cannot_be_trained_on_goes_to_the_queue_whole_and_becomes_a_dead_letter(
    config: bytes, tmp_path: Path
) -> None:
    async def main() -> None:
        actor = queue_of(config, tmp_path)
        await made_version_0(actor)
        good, bad = await sample(actor, 0, 2)
        bad = msgspec.structs.replace(bad, tokens=np.array([5, 999], np.int32).tobytes())
        await deliver(actor, [bad, good])
        assert sum(bodies(tmp_path)) == 1
        (letter,) = Journal(tmp_path / "journal.sqlite").dead_letters()
        assert (letter.trajectory, letter.reason) == (
            bad,
            "token 999 of the completion is not one of the model's 500 tokens",
        )

    asyncio.run(main())


def test_missing_and_damaged_trajectories_are_errors_that_name_the_file(config: bytes, tmp_path: Path) -> None:
    made, _ = told(rows=2)
    file = path(tmp_path, 0)
    held = TrajectoryStore(tmp_path, 0)
    held.write({one.identity: encode(one) for one in made})
    with pytest.raises(JournalError, match=r"0\.sqlite: the queue has the record of .* tokens are missing here"):
        held.read([Identity(task="test", prompt=77, sample=0)])
    held.close()
    with sqlite3.connect(file) as db:
        db.execute("update bodies set row = zeroblob(length(row)) where prompt = 1")
    db.close()
    another = TrajectoryStore(tmp_path, 0)
    assert another.read([made[0].identity]) == made[:1]
    with pytest.raises(JournalError, match=r"0\.sqlite: damaged: a row of 'bodies'"):
        another.read([made[1].identity])
    another.close()
    file.write_bytes(file.read_bytes()[:4096])
    with pytest.raises(JournalError, match=r"0\.sqlite"):
        TrajectoryStore(tmp_path, 0).read([made[0].identity])


def test_records_come_back_in_the_order_of_their_trajectories(config: bytes, tmp_path: Path) -> None:
    made, _ = told(rows=9)
    made = [made[row] for row in (4, 0, 8, 2, 7, 1, 3, 6, 5)]
    shards = shard_case.shards(config, tmp_path, as_it_is)
    records = asyncio.run(shards.store(made))
    assert [one.identity for one in records] == [one.identity for one in made]
    assert bodies(tmp_path) == [3, 3, 3]


# --- the queue and its shards ------------------------------------------------------------------------------------


def test_no_token_passes_the_queue(config: bytes, tmp_path: Path) -> None:
    marked = np.array([321, 123, 321, 123, 321], np.int32).tobytes()

    async def main() -> None:
        actor = queue_of(config, tmp_path)
        seen: list[bytes] = []
        delivered = actor.deliver

        async def watched(*given: Any) -> bytes:
            seen.extend(one for one in given if isinstance(one, bytes))
            return await delivered(*given)

        actor.deliver = watched
        await made_version_0(actor)
        made = await sample(actor, 0, 8)
        columns = {"logprobs": bytes(20), "versions": bytes(20), "mask": b"\1" * 5}
        made = [msgspec.structs.replace(one, tokens=marked, **columns) for one in made]
        await deliver(actor, made)
        assert whole(await actor.take(0)).trajectories == tuple(made)
        assert seen and not any(marked in one for one in seen)
        assert all(isinstance(one, TrajectoryRecord) for one in actor._queue.leased_batch(0).trajectories)
        journal = b"".join(file.read_bytes() for file in tmp_path.glob("journal*"))
        shards = b"".join(file.read_bytes() for file in (tmp_path / "shards").iterdir())
        assert marked not in journal and marked in shards

    asyncio.run(main())


def test_trajectories_go_when_their_batch_is_archived_and_never_before(
    config: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        actor = queue_of(config, tmp_path)
        await made_version_0(actor)
        made = await sample(actor, 0, 12)
        await deliver(actor, made)
        await actor.take(0)
        assert sum(bodies(tmp_path)) == 12
        with monkeypatch.context() as broken:
            broken.setattr(Journal, "write", _full_disk)
            with pytest.raises(JournalError, match="full"):
                await actor.publish(push(1), [], b"", 0)
            await asyncio.sleep(0.1)
        assert sum(bodies(tmp_path)) == 12, "dropped before the journal knew of the archive's files"
        again = queue_of(config, tmp_path)
        await again.publish(push(0), [], b"", 0)
        batch = whole(await again.take(0))
        await again.publish(push(1), [], b"", 0)
        await asyncio.sleep(0.2)
        assert sum(bodies(tmp_path)) == 4
        assert archive.open(tmp_path).batch(0) == batch == whole(await again.take(0))
        unit = next(iter(again._queue.state.units.values()))
        again._queue._abandon(unit, "resampled", "it teaches nothing")
        await again._commits.commit()
        await asyncio.sleep(0.2)
        assert sum(bodies(tmp_path)) == 3

    asyncio.run(main())


def _full_disk(*_: object) -> None:
    raise JournalError("disk is full")


def test_what_was_not_dropped_in_time_goes_when_its_prompt_is_no_longer_held(config: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        actor = queue_of(config, tmp_path)
        await made_version_0(actor)
        dropped, actor._shards.drop = actor._shards.drop, lambda *_: None
        await deliver(actor, await sample(actor, 0, 8))
        await actor.take(0)
        await actor.publish(push(1), [], b"", 0)
        await asyncio.sleep(0.1)
        assert sum(bodies(tmp_path)) == 8
        actor._shards.drop = dropped
        await deliver(actor, await sample(actor, 1, 8, version=1))
        await actor.take(1)
        await actor.publish(push(2), [], b"", 0)
        await asyncio.sleep(0.2)
        assert sum(bodies(tmp_path)) == 0

    asyncio.run(main())


def test_nothing_is_dropped_for_a_version_that_is_not_in_the_journal_yet(
    config: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), Journal.write

    async def main() -> None:
        actor = queue_of(config, tmp_path)
        await made_version_0(actor)
        await deliver(actor, await sample(actor, 0, 16))
        await actor.take(0)
        await actor.take(1)
        unit = next(iter(actor._queue.state.units.values()), None)
        assert unit is None, "both batches are leased"
        with monkeypatch.context() as held:
            held.setattr(Journal, "write", lambda *given, **words: (gate.wait(20), write(*given, **words))[1])
            first = asyncio.create_task(actor.publish(push(1), [], b"", 0))
            while actor._queue.state.version == 0:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        second = actor._archive_batch(1, b"")
        await second
        # Only the test knows the second version: the transaction of the first one is being written.
        actor._queue.publish(2)
        gate.set()
        await first
        await asyncio.sleep(0.2)
        assert sum(bodies(tmp_path)) == 8, "a death would leave the lease of batch 1 without its tokens"

    try:
        asyncio.run(asyncio.wait_for(main(), 40))
    finally:
        gate.set()


async def taken(actor: QueueActor, made: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories of batch 0, which has those that were `made`."""
    await made_version_0(actor)
    tickets = await sample(actor, 0, len(made))
    given = [
        msgspec.structs.replace(one, identity=ticket.identity, actor="a")
        for one, ticket in zip(made, tickets, strict=True)
    ]
    await deliver(actor, given)
    await actor.take(0)
    return given


def test_an_archive_in_parts_has_the_batch_and_the_learners_numbers_in_their_order(
    config: bytes, tmp_path: Path
) -> None:
    made, learned = told(rows=8)

    async def main() -> None:
        actor = queue_of(config, tmp_path)
        given = await taken(actor, made)
        await actor.publish(push(1), [], shard_case.told(actor, learned), 0)
        _expect(tmp_path, given, learned)

    asyncio.run(main())
    files = sorted(file.name for file in (tmp_path / "archive").iterdir())
    assert files == [f"00000000.{number}-of-3.zarr.zip" for number in (1, 2, 3)]
    for name in files:
        file, generator = tmp_path / "archive" / name, random.Random(0)
        before = file.read_bytes()
        damage(file, generator)
        with pytest.raises(JournalError, match=name):
            archive.open(tmp_path).batch(0)
        file.write_bytes(before)
    found = archive.open(tmp_path)
    found.drop(1)
    assert list((tmp_path / "archive").iterdir()) == []


def test_numbers_of_a_rank_that_cannot_be_reached_are_not_waited_for_and_those_of_the_next_ranks_are_taken(
    config: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "RECORD_S", 0.1)
    made, learned = told(rows=8)

    async def main() -> None:
        actor = queue_of(config, tmp_path)
        given = await taken(actor, made)
        never: Any = [shard_case.Never()]
        with pytest.raises(TimeoutError):
            await actor.publish(push(1), [], never, 0)
        await actor.publish(push(1), [], shard_case.told(actor, learned), 0)
        _expect(tmp_path, given, learned)

    asyncio.run(asyncio.wait_for(main(), 40))


def _expect(run: Path, given: Sequence[Trajectory], learned: TokenRecord) -> None:
    """The archive has `given` as it is, and as it has it of a queue without shards."""
    found, alone = archive.open(run), archive.Archive(run / "alone", {})
    batch, numbers = found.batch_and_record(0)
    assert batch.trajectories == tuple(given)
    assert np.concatenate(numbers["values"]).tobytes() == learned.values
    alone.write(batch, learned)
    alone._asides[0][0].rename(alone.path(0))
    alone.checksums[0] = (archive.durable.sha256(alone.path(0)),)
    assert sorted(map(str, alone.table(0).schema)) == sorted(map(str, found.table(0).schema))
    assert alone.table(0).to_pydict() == found.table(0).to_pydict()
    assert {name: one.tolist() for name, one in alone.columns(0).items()} == {
        name: one.tolist() for name, one in found.columns(0).items()
    }


@pytest.mark.parametrize("error", [JournalError("disk is full"), RuntimeError("can't start new thread")])
def test_a_write_that_fails_for_several_callers_is_tried_again_by_each(
    error: Exception, config: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write takes its time, so that two calls wait for the second, which fails."""
    gate, calls, write = threading.Event(), list[int](), TrajectoryStore.write

    def fail_once(store: TrajectoryStore, encoded: dict[Identity, bytes]) -> None:
        calls.append(len(encoded))
        assert gate.wait(20)
        if len(calls) == 2:
            raise error
        write(store, encoded)

    async def main() -> None:
        made = [encode((one,)) for one in told(rows=9)[0][::SHARDS]]
        one = QueueShard(config, str(tmp_path), str(tmp_path), 0, put=as_it_is)
        with monkeypatch.context() as broken:
            broken.setattr(TrajectoryStore, "write", fail_once)
            stores = [asyncio.create_task(one.store(made[0]))]
            while not calls:
                await asyncio.sleep(0.01)
            stores += [asyncio.create_task(one.store(row)) for row in made[1:]]
            for _ in range(10):
                await asyncio.sleep(0)
            gate.set()
            answers = await asyncio.gather(*stores, return_exceptions=True)
        assert [type(answer) for answer in answers] == [bytes, type(error), bytes]
        assert calls == [1, 2, 2], "the call that raised is repeated by its caller"
        assert bodies(tmp_path)[0] == 3

    asyncio.run(main())
