"""The queue's actor without Ray: what is acknowledged is on disk, and versions follow their archived batch."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import trajectory

from streamppo.config import Config
from streamppo.errors import CheckpointError, Diverged, JournalError, QueueError
from streamppo.replay import archive
from streamppo.replay.actor import ReplayActor
from streamppo.replay.journal import Journal
from streamppo.replay.replayer import Replayer
from streamppo.types import Batch, Push, Ticket, Trajectory, decode, encode

SMALL = ("queue.batch_size=4", "queue.samples_per_prompt=1", "queue.max_lag=1")


@pytest.fixture
def actor_of(math_config: Callable[..., Config], tmp_path: Path) -> Callable[..., ReplayActor]:
    def make(*overrides: str) -> ReplayActor:
        return ReplayActor(msgspec.msgpack.encode(math_config(*SMALL, *overrides)), str(tmp_path))

    return make


def push(version: int, checksum: str = "") -> bytes:
    checksums = (checksum or f"checksum {version}",)
    return encode(Push(version=version, base_version=None, tensors=(), bucket_bytes=(1,), checksums=checksums))


def done(ticket: Ticket, version: int = 0) -> Trajectory:
    return msgspec.structs.replace(trajectory([5, 6], versions=[version] * 2), identity=ticket.identity)


async def sample(actor: ReplayActor, call: int, count: int, version: int = 0) -> list[Trajectory]:
    tickets = decode(await actor.issue("a", version, count, call), tuple[Ticket, ...])
    assert len(tickets) == count
    return [done(ticket, version) for ticket in tickets]


async def deliver(actor: ReplayActor, made: list[Trajectory]) -> None:
    await actor.deliver(encode(tuple(made)), encode(()))


async def made_version_1(actor: ReplayActor) -> Batch:
    """Version 0, a batch, version 1."""
    await actor.begin(0)
    await actor.publish(push(0), [], b"", 0)
    await deliver(actor, await sample(actor, 0, 4))
    batch = decode(await actor.take(0), Batch)
    await actor.publish(push(1), [], b"", 0)
    return batch


def test_whatever_was_acknowledged_is_there_after_a_kill(actor_of: Callable[..., ReplayActor]) -> None:
    async def main() -> None:
        first = actor_of()
        await first.begin(0)
        await first.publish(push(0), [], b"", 0)
        made = await sample(first, 0, 6)
        await deliver(first, made[1:5])
        batch = await first.take(0)
        second = actor_of()
        await deliver(second, made[:1])
        assert await second.take(0) == batch, "an older one came later, and the lease was forgotten"
        assert decode(await second.issue("a", 0, 9, 0), tuple[Ticket, ...])[0].identity == made[5].identity
        await deliver(second, [*made])
        report = second._queue.report()
        assert (report.ready, report.duplicates) == (2, 5)

    asyncio.run(main())


def test_a_version_waits_until_its_batch_is_in_the_archive(
    actor_of: Callable[..., ReplayActor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), archive.Archive.write
    monkeypatch.setattr(archive.Archive, "write", lambda *arguments: (gate.wait(20), write(*arguments))[1])

    async def main() -> None:
        actor = actor_of()
        await actor.begin(0)
        await actor.publish(push(0), [], b"", 0)
        await deliver(actor, await sample(actor, 0, 4))
        batch = decode(await actor.take(0), Batch)
        values = np.arange(8, dtype=np.float32)
        publishing = asyncio.create_task(actor.publish(push(1), [], values.tobytes(), 0))
        again = asyncio.create_task(actor.publish(push(1), [], values.tobytes(), 0))
        await asyncio.sleep(0.3)
        assert not publishing.done()
        assert actor._ledger.newest == 0
        assert 1 not in Journal(tmp_path / "journal.sqlite").versions()
        gate.set()
        await asyncio.gather(publishing, again)
        assert actor._ledger.newest == 1
        found = archive.open(tmp_path)
        assert found.batch(0) == batch
        assert found.columns(0)["values"].tolist() == values.tolist()

    try:
        asyncio.run(asyncio.wait_for(main(), 30))
    finally:
        gate.set()


def test_what_was_trained_on_before_comes_from_the_archive_and_is_compared(
    actor_of: Callable[..., ReplayActor],
) -> None:
    async def main() -> None:
        batch = await made_version_1(actor_of())
        actor = actor_of()
        assert await actor.begin(0) == 1
        assert decode(await actor.take(0), Batch) == batch
        await actor.publish(push(0), ["again"], b"", 0)
        assert actor._ledger.newest is None, "engines start from the newest version"
        await actor.publish(push(1), ["again"], b"", 0)
        assert actor._ledger.newest == 1
        with pytest.raises(Diverged, match="version 1 was made again and has other weights"):
            await actor.publish(push(1, "another"), [], b"", 0)

    asyncio.run(main())


def test_a_learner_that_was_given_up_cannot_publish(actor_of: Callable[..., ReplayActor]) -> None:
    async def main() -> None:
        actor = actor_of()
        await actor.publish(push(0), [], b"", 1)
        with pytest.raises(QueueError, match="learner 0, which was given up for dead"):
            await actor.publish(push(0), [], b"", 0)

    asyncio.run(main())


def test_another_configuration_is_refused_where_versions_must_be_redone(actor_of: Callable[..., ReplayActor]) -> None:
    async def main() -> None:
        await made_version_1(actor_of())
        with pytest.raises(CheckpointError, match="versions 1 to 1 must be redone as they were made"):
            await actor_of("learner.lr=1e-5").begin(0)
        await actor_of("rollout.actors=2", "evaluation.every=3", "cluster.cpus=9").begin(0)
        await actor_of("learner.lr=1e-5").begin(1)
        configs = actor_of()._journal.configs()
        assert list(configs) == [0, 1]
        assert decode(configs[1], Config).learner.lr == 1e-5

    asyncio.run(main())


def test_after_a_failed_transaction_nothing_is_acknowledged_any_more(
    actor_of: Callable[..., ReplayActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        actor = actor_of()
        await actor.begin(0)
        made = await sample(actor, 0, 4)

        def full(*_: Any) -> None:
            raise JournalError("journal.sqlite: database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(actor._journal, "write", full)
            with pytest.raises(JournalError, match="disk is full"):
                await deliver(actor, made[:1])
        with pytest.raises(JournalError, match="disk is full"):
            await deliver(actor, made[1:])
        assert actor_of()._queue.report().ready == 0

    asyncio.run(main())


def test_those_who_wait_share_a_transaction(actor_of: Callable[..., ReplayActor]) -> None:
    async def main() -> None:
        actor = actor_of("queue.batch_size=100")
        await actor.begin(0)
        before = actor._journal._number
        made = await sample(actor, 0, 50)
        await asyncio.gather(*(deliver(actor, [one]) for one in made))
        assert actor._queue.report().ready == 50
        assert actor._journal._number - before <= 4

    asyncio.run(main())


def test_after_stop_whoever_waits_for_a_batch_gets_none(actor_of: Callable[..., ReplayActor]) -> None:
    async def main() -> None:
        actor = actor_of()
        waiting = asyncio.create_task(actor.take(0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await actor.stop()
        assert await waiting == b""

    asyncio.run(main())


def test_an_actor_that_calls_is_not_silent(actor_of: Callable[..., ReplayActor]) -> None:
    async def main() -> None:
        actor = actor_of()
        assert await actor.silent(["a", "b"], 0.2) == []
        await asyncio.sleep(0.3)
        await actor.swapped("a", 0)
        assert await actor.silent(["a", "b"], 0.2) == ["b"]

    asyncio.run(main())


def test_the_replayer_gives_the_archived_batches(actor_of: Callable[..., ReplayActor], tmp_path: Path) -> None:
    async def main() -> None:
        batch = await made_version_1(actor_of())
        replayer = Replayer(str(tmp_path))
        assert decode(await replayer.take(0), Batch) == batch
        await replayer.publish(push(1), [], b"", 0)
        assert list(await replayer.digests()) == [1]

    asyncio.run(main())
