"""The queue's actor without Ray: acknowledged rows are on disk, and versions follow their archived batch."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import pytest
import shard_case
from conftest import trajectory
from shard_case import told

from streamppo.commands.look import inspect as inspection
from streamppo.config.sections import Config
from streamppo.config.task import DataTask, Environment, Source
from streamppo.errors import CheckpointError, Diverged, JournalError, ModelError, QueueError, TooManyFailures
from streamppo.queue import actor as queue_actor
from streamppo.queue import report
from streamppo.queue.actor import QueueActor
from streamppo.queue.batch_source import ArchiveSource
from streamppo.queue.rules.validation import TokenLimits, defect
from streamppo.queue.store import archive, batch_parts, snapshot
from streamppo.queue.store.journal import Journal
from streamppo.queue.token_limits import read_token_limits
from streamppo.types import Batch, Failure, Push, QueueReport, Tensor, Ticket, TokenRecord, Trajectory, decode, encode

SMALL = ("queue.batch_size=4", "queue.samples_per_prompt=1", "queue.max_lag=1")

COPIED = ("queue.standby=true", "cluster.own_disks=true", "checkpoint.remote=memory://copies")
WAYS = {
    "alone": (),
    "with 3 shards": ("queue.shards=3",),
    "with a copy": COPIED,
    "with copies of 3 shards": ("queue.shards=3", *COPIED),
}


@pytest.fixture(params=WAYS)
def actor_of(
    math_config: Callable[..., Config], tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., QueueActor]:
    (tmp_path / "config.json").write_text('{"vocab_size": 17}')
    (tmp_path / "remote.address").write_text(f"memory://copies/{uuid4().hex}")

    def make(*overrides: str) -> QueueActor:
        config = msgspec.msgpack.encode(math_config(*SMALL, *WAYS[request.param], *overrides))
        shards = shard_case.shards(config, tmp_path, as_it_is)
        return QueueActor(config, str(tmp_path), str(tmp_path), put=as_it_is, shards=lambda _: shards)

    return make


def as_it_is(encoded: np.ndarray) -> Any:
    """Stands in for the object store."""
    return encoded.tobytes()


def push(version: int, name: str = "", admitted_lag: int | None = None) -> bytes:
    weights = Tensor(name=name or f"of version {version}", dtype="float32", shape=(0,), nbytes=0, content=0)
    made = Push(
        version=version,
        base_version=None,
        tensors=(weights,),
        pieces=(),
        bucket_bytes=(1,),
        admitted_lag=admitted_lag,
    )
    return encode(made)


def whole(found: Any) -> Batch:
    """The batch that a rank puts together."""
    return batch_parts.merge([decode(one, Batch) for one in found])


def done(ticket: Ticket, version: int = 0) -> Trajectory:
    return msgspec.structs.replace(trajectory([5, 6], versions=[version] * 2), identity=ticket.identity)


def counted(actor: QueueActor) -> QueueReport:
    return report.report(actor._queue.state)


def journal(run: Path) -> Journal:
    """The journal as a reader sees it."""
    return Journal(run / "journal.sqlite")


async def sample(actor: QueueActor, call: int, count: int, version: int = 0) -> list[Trajectory]:
    tickets = decode(await actor.issue("a", version, count, call), tuple[Ticket, ...])
    assert len(tickets) == count
    return [done(ticket, version) for ticket in tickets]


async def deliver(actor: QueueActor, made: list[Trajectory]) -> None:
    await shard_case.deliver(actor, "a", made)


async def made_version_0(actor: QueueActor) -> None:
    """A new run: the driver has begun, and the learner has published its first version."""
    await actor.begin(0)
    await actor.publish(push(0), [], b"", 0)


async def made_version_1(actor: QueueActor) -> Batch:
    """Version 0, a batch, version 1."""
    await made_version_0(actor)
    await deliver(actor, await sample(actor, 0, 4))
    batch = whole(await actor.take(0))
    await actor.publish(push(1), [], b"", 0)
    return batch


def test_whatever_was_acknowledged_is_there_after_a_kill(actor_of: Callable[..., QueueActor]) -> None:
    async def main() -> None:
        first = actor_of()
        await made_version_0(first)
        made = await sample(first, 0, 6)
        await deliver(first, made[1:5])
        batch = await first.take(0)
        second = actor_of()
        await deliver(second, made[:1])
        assert await second.take(0) == batch, "an older one came later, and the lease was forgotten"
        assert decode(await second.issue("a", 0, 9, 0), tuple[Ticket, ...])[0].identity == made[5].identity
        await deliver(second, [*made])
        assert (counted(second).ready, counted(second).duplicates) == (2, 5)

    asyncio.run(main())


def test_a_delivery_is_answered_by_the_tickets_that_there_are_and_again_by_the_same_ones(
    actor_of: Callable[..., QueueActor],
) -> None:
    async def main() -> None:
        first = actor_of()
        await made_version_0(first)
        made = await sample(first, 0, 2)
        given = await shard_case.given(first, made)

        async def again(actor: QueueActor, limit: int, call: int) -> tuple[Ticket, ...]:
            answer = await actor.deliver("a", 0, given, encode(()), engine_version=0, limit=limit, call=call)
            return decode(answer, tuple[Ticket, ...])

        tickets = await again(first, 3, 1)
        assert len(tickets) == 3 and counted(first).ready == 2
        assert await again(first, 3, 1) == tickets, "an answer that was lost"
        second = actor_of()
        assert await again(second, 3, 1) == tickets, "they were in the journal before they were given"
        assert await again(second, 0, 2) == (), "none was asked for"
        assert 0 < len(await again(second, 100, 2)) < 100
        assert await again(second, 1, 3) == (), "no more are admitted, and nobody waits"

    asyncio.run(main())


def test_the_lag_that_came_with_a_version_is_admitted_also_after_a_kill(actor_of: Callable[..., QueueActor]) -> None:
    async def main() -> None:
        options = ("queue.max_lag={kind='adaptive', at_most=8}", "queue.ahead=max_lag")
        first = actor_of(*options)
        await made_version_0(first)
        await deliver(first, await sample(first, 0, 4))
        await first.take(0)
        await first.publish(push(1, admitted_lag=3), [], b"", 0)
        second = actor_of(*options)
        await second.begin(1)
        await sample(second, 1, 4 * 4, version=1)
        assert not second._queue.has_ticket(1)
        # A learner that makes the version again reports it again; the queue takes new versions alone.
        await second.publish(push(1, admitted_lag=5), [], b"", 1)
        assert not second._queue.has_ticket(1)

    asyncio.run(main())


def test_a_version_waits_until_its_batch_is_in_the_archive(
    actor_of: Callable[..., QueueActor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), archive.write
    monkeypatch.setattr(archive, "write", lambda *arguments: (gate.wait(20), write(*arguments))[1])

    async def main() -> None:
        actor = actor_of()
        await made_version_0(actor)
        await deliver(actor, await sample(actor, 0, 4))
        batch = whole(await actor.take(0))
        values = np.arange(8, dtype=np.float32)
        learned = told(actor, TokenRecord(values=values.tobytes()))
        publishing = asyncio.create_task(actor.publish(push(1), [], learned, 0))
        again = asyncio.create_task(actor.publish(push(1), [], learned, 0))
        await asyncio.sleep(0.3)
        assert not publishing.done()
        assert actor._ledger.newest == 0
        assert 1 not in journal(tmp_path).versions()
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
    actor_of: Callable[..., QueueActor],
) -> None:
    async def main() -> None:
        batch = await made_version_1(actor_of())
        actor = actor_of()
        assert await actor.begin(0) == 1
        assert whole(await actor.take(0)) == batch
        await actor.publish(push(0), ["again"], b"", 0)
        assert actor._newest() is None, "engines start from the newest version"
        await actor.publish(push(1), ["again"], b"", 0)
        assert actor._newest() == 1
        with pytest.raises(Diverged, match="version 1 was redone and has other weights"):
            await actor.publish(push(1, "another"), [], b"", 0)

    asyncio.run(main())


def test_weights_of_a_run_that_need_not_be_exact_may_be_others_and_the_journal_keeps_the_first(
    actor_of: Callable[..., QueueActor], tmp_path: Path
) -> None:
    async def main() -> None:
        await made_version_1(actor_of("learner.exact=false"))
        first = journal(tmp_path).versions()[1].digest
        actor = actor_of("learner.exact=false")
        await actor.begin(0)
        await actor.publish(push(0), [], b"", 0)
        await actor.publish(push(1, "another"), [], b"", 0)
        assert actor._ledger.newest == 1
        assert journal(tmp_path).versions()[1].digest == first

    asyncio.run(main())


def test_a_queue_that_was_given_up_for_dead_and_still_writes_reaches_neither_journal_nor_archive(
    actor_of: Callable[..., QueueActor], tmp_path: Path
) -> None:
    async def main() -> None:
        zombie = actor_of()
        await made_version_0(zombie)
        made = await sample(zombie, 0, 5)
        await deliver(zombie, made[:4])
        batch = await zombie.take(0)
        (tmp_path / "archive").mkdir()
        (tmp_path / "archive" / "00000000.zarr.zip.left.tmp").write_bytes(b"half")
        living = actor_of()
        assert list((tmp_path / "archive").iterdir()) == []
        with pytest.raises(JournalError, match="marked dead"):
            await deliver(zombie, made[4:])
        zombie._broken = None
        assert await living.begin(0) == 0
        assert await living.take(0) == batch
        await living.publish(push(1), [], told(living, TokenRecord(values=np.ones(8, np.float32).tobytes())), 1)
        for learned in (told(zombie, TokenRecord(values=np.zeros(8, np.float32).tobytes())), b""):
            # Its shards lack the living one's archived rows.
            with pytest.raises(JournalError, match=r"marked dead|tokens are missing"):
                await zombie.publish(push(1), [], learned, 0)
            zombie._broken = None
        found = archive.open(tmp_path)
        assert found.batch(0) == whole(batch)
        assert found.columns(0)["values"].tolist() == [1.0] * 8

    asyncio.run(main())


def test_what_an_old_queue_acknowledges_while_a_new_one_opens_the_journal_is_not_lost(
    actor_of: Callable[..., QueueActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        old = actor_of()
        await made_version_0(old)
        made = await sample(old, 0, 4)
        await deliver(old, made[:3])
        if old._shards:
            old._queue.put_records(await old._shards.store(made[3:]))
        else:
            old._queue.put([made[3]])
        last, fence = snapshot.take_changes(old._queue.settings, old._queue.state), Journal.fence
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "fence", lambda journal: (old._journal.write(last), fence(journal)))
            new = actor_of()
        assert counted(new).ready == 4
        assert await new.begin(0) == 0
        assert whole(await new.take(0)).trajectories == tuple(made)

    asyncio.run(main())


def test_a_learner_that_redoes_the_newest_version_waits_until_its_batch_has_its_name(
    actor_of: Callable[..., QueueActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), Journal.write

    async def main() -> None:
        actor = actor_of()
        await made_version_0(actor)
        await deliver(actor, await sample(actor, 0, 4))
        batch = whole(await actor.take(0))
        monkeypatch.setattr(Journal, "write", lambda *arguments: (gate.wait(20), write(*arguments))[1])
        publishing = asyncio.create_task(actor.publish(push(1), [], b"", 0))
        while actor._queue.state.version == 0:
            await asyncio.sleep(0.01)
        taking = asyncio.create_task(actor.take(0))
        await asyncio.sleep(0.1)
        assert not publishing.done()
        gate.set()
        assert whole(await taking) == batch
        await publishing

    try:
        asyncio.run(asyncio.wait_for(main(), 30))
    finally:
        gate.set()


def test_a_learner_that_was_given_up_cannot_publish(actor_of: Callable[..., QueueActor]) -> None:
    async def main() -> None:
        actor = actor_of()
        await actor.publish(push(0), [], b"", 1)
        with pytest.raises(QueueError, match="learner 0, which was marked dead"):
            await actor.publish(push(0), [], b"", 0)

    asyncio.run(main())


def test_another_configuration_holds_from_the_newest_version_on_wherever_the_learner_begins(
    actor_of: Callable[..., QueueActor],
) -> None:
    async def main() -> None:
        await made_version_1(actor_of())
        await actor_of("rollout.actors=2", "evaluation.every=3", "cluster.cpus=9").begin(0)
        await actor_of("learner.lr=1e-5").begin(0)
        configs = actor_of()._journal.configs()
        assert list(configs) == [0, 1]
        assert decode(configs[1], Config).learner.lr == 1e-5

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "sentence"),
    {
        "model.dtype=bfloat16": "a run keeps its model.dtype: it was 'float32', and cannot become 'bfloat16'",
        "model.tiny.hidden_size=32": "a run keeps its model.tiny.hidden_size: it was 64, and cannot become 32",
        "algorithm.critic.model=scratch": "a run keeps its algorithm.critic.model: it was 'head'",
        "learner.ranks=2": "a run keeps its learner.ranks: it was 1, and cannot become 2",
    }.items(),
)
def test_what_a_run_keeps_cannot_be_changed(actor_of: Callable[..., QueueActor], change: str, sentence: str) -> None:
    async def main() -> None:
        await made_version_1(actor_of())
        with pytest.raises(CheckpointError, match=sentence):
            await actor_of(change).begin(1)
        assert list(actor_of()._journal.configs()) == [0]
        await actor_of("model.gradient_checkpointing=full", "model.float32_head=false").begin(1)

    asyncio.run(main())


@pytest.mark.parametrize("choice", ["algorithm.advantage.kind=rloo", "algorithm.whiten.over=group"])
def test_samples_that_are_compared_come_together(actor_of: Callable[..., QueueActor], choice: str) -> None:
    async def main() -> None:
        actor = actor_of("queue.samples_per_prompt=2", choice)
        await made_version_0(actor)
        given = await tickets(actor, 0, 6)
        await deliver(actor, [done(given[number]) for number in (0, 2, 3, 4, 5)])
        batch = whole(await actor.take(0))
        assert [row.identity.prompt for row in batch.trajectories] == [1, 1, 2, 2]

    asyncio.run(main())


def test_after_a_failed_transaction_nothing_is_acknowledged_any_more(
    actor_of: Callable[..., QueueActor], monkeypatch: pytest.MonkeyPatch
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
        assert counted(actor_of()).ready == 0

    asyncio.run(main())


DEFECTS = {
    "token 17 of the completion is not one of the model's 17 tokens": {"tokens": [5, 17]},
    "token -1 of the completion is not one of the model's 17 tokens": {"tokens": [-1, 5]},
    "token 99 of the prompt is not one of the model's 17 tokens": {"prompt": [3, 99]},
    "too long: a completion of 6 tokens, and 5 are allowed": {"tokens": [5] * 6},
    "a log-prob is not finite": {"logprobs": [-1.0, float("nan")]},
    "a log-prob is positive: 0.25": {"logprobs": [-1.0, 0.25]},
    "columns of different lengths, or empty: 2 tokens, 2 log-probs, 2 versions, 3 mask": {"mask": [True] * 3},
    "the mask has 7, which is neither 0 nor 1": {"mask": [True, 7]},
    "no token was sampled by the policy": {"mask": [False, False]},
    "the reward is nan": {"reward": float("nan")},
}


def broken(ticket: Ticket, columns: dict[str, Any]) -> Trajectory:
    mask = np.array(columns.get("mask", [True] * len(columns.get("tokens", "ab"))), np.uint8).tobytes()
    made = trajectory(columns.get("tokens", [5, 6]), **{name: columns[name] for name in columns if name[0] in "plr"})
    return msgspec.structs.replace(made, identity=ticket.identity, actor="a", mask=mask)


async def tickets(actor: QueueActor, call: int, count: int) -> tuple[Ticket, ...]:
    return decode(await actor.issue("a", 0, count, call), tuple[Ticket, ...])


@pytest.mark.parametrize("reason", DEFECTS)
def test_what_cannot_be_trained_on_is_kept_with_its_reason_and_its_slot_is_sampled_again(
    actor_of: Callable[..., QueueActor], tmp_path: Path, reason: str
) -> None:
    async def main() -> None:
        actor = actor_of()
        await made_version_0(actor)
        given = await tickets(actor, 0, 4)
        letter = broken(given[1], DEFECTS[reason])
        await deliver(actor, [done(given[0]), letter, done(given[2]), done(given[3])])
        await deliver(actor, [letter])
        # The payload is bytes for bytes the same, NaN included, in a process that was not there.
        (kept,) = journal(tmp_path).dead_letters()
        assert (encode(kept.trajectory), kept.reason) == (encode(letter), reason)
        assert counted(actor).failed == {"engine": 1}
        (again,) = await tickets(actor, 1, 1)
        assert (again.slot, again.identity.attempt) == (given[1].slot, 1)
        await deliver(actor, [done(again)])
        batch = whole(await actor.take(0))
        assert [row.identity for row in batch.trajectories] == [
            given[0].identity,
            again.identity,
            given[2].identity,
            given[3].identity,
        ]

    asyncio.run(main())


def test_a_prompt_that_only_makes_dead_letters_is_given_up(actor_of: Callable[..., QueueActor]) -> None:
    async def main() -> None:
        actor = actor_of("queue.max_attempts=3", "queue.max_lag=0")
        await made_version_0(actor)
        first, *others = await tickets(actor, 0, 4)
        await deliver(actor, [done(ticket) for ticket in others])
        for attempt in range(3):
            # A queue that dies in between does not begin to count anew.
            actor = actor_of("queue.max_attempts=3", "queue.max_lag=0")
            assert (first.identity.prompt, first.identity.attempt) == (0, attempt)
            await deliver(actor, [broken(first, {"tokens": [99]})])
            (first,) = await tickets(actor, attempt + 1, 9)
        assert (first.identity.prompt, first.identity.attempt) == (4, 0)
        assert counted(actor).dropped["abandoned"] == 1
        assert counted(actor).dead_letters == 3
        assert [letter.trajectory.identity.attempt for letter in actor_of()._journal.dead_letters()] == [0, 1, 2]

    asyncio.run(main())


def test_people_can_ask_what_became_of_a_prompt(
    actor_of: Callable[..., QueueActor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        actor = actor_of("queue.samples_per_prompt=4", "queue.max_lag=2", "queue.ahead=max_lag")
        await made_version_0(actor)
        given = await tickets(actor, 0, 9)
        failed = encode((Failure(identity=given[5].identity, actor="a", stage="reward", reason="no answer"),))
        await actor.deliver("a", 0, encode(()), failed)
        await deliver(actor, [*map(done, given[:5]), broken(given[6], DEFECTS["the reward is nan"])])
        await actor.take(0)
        assert [inspection.inspect_prompt(tmp_path, prompt) for prompt in (0, 1, 2)] == [0, 0, 0]
        await actor.publish(push(1), [], b"", 0)
        assert inspection.inspect_prompt(tmp_path, 0) == 0

    asyncio.run(main())
    with pytest.raises(JournalError, match="prompt 3 was never issued"):
        inspection.inspect_prompt(tmp_path, 3)
    assert capsys.readouterr().out.splitlines() == [
        "arithmetic prompt 0",
        *(f"  sample {sample} attempt 0: leased to update 1" for sample in range(4)),
        "arithmetic prompt 1",
        "  sample 0 attempt 0: ready",
        "  sample 1 attempt 0: failed: reward: no answer",
        "  sample 1 attempt 1: to be sampled",
        "  sample 2 attempt 0: dead letter: engine: the reward is nan",
        "  sample 2 attempt 1: to be sampled",
        "  sample 3 attempt 0: issued to a",
        "arithmetic prompt 2",
        "  sample 0 attempt 0: issued to a",
        "arithmetic prompt 0",
        *(f"  sample {sample} attempt 0: trained on by update 1: reward 0, 2 tokens" for sample in range(4)),
    ]


def test_segments_are_taken_archived_and_traced_one_by_one_and_survive_a_kill(
    actor_of: Callable[..., QueueActor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four completions two hand over a segment; one of these then fails, and is sampled again from its beginning."""

    def segment(ticket: Ticket, number: int, finish: str) -> Trajectory:
        named = msgspec.structs.replace(ticket.identity, segment=number)
        prompt = [3, 4, 5, *[5, 6] * number]
        made = trajectory([5, 6], prompt=prompt, finish=finish, reward=float(finish == "stop"))
        return msgspec.structs.replace(made, identity=named, prefix=2 * number)

    async def main() -> None:
        options = ("queue.segments={max_tokens = 2}", "queue.too_old=mask", "queue.max_lag=2", "queue.batch_size=4")
        actor = actor_of(*options)
        await made_version_0(actor)
        given = await tickets(actor, 0, 4)
        await deliver(actor, [segment(given[0], 0, "cut"), segment(given[1], 0, "cut"), *map(done, given[2:])])
        again = segment(given[0], 0, "cut")
        await deliver(actor, [again])
        assert (counted(actor).ready, counted(actor).cut, counted(actor).duplicates) == (4, 2, 1)
        batch = whole(await actor.take(0))
        assert [one.finish for one in batch.trajectories] == ["cut", "cut", "stop", "stop"]
        failed = msgspec.structs.replace(given[1].identity, segment=1)
        await actor.deliver(
            "a", 0, encode(()), encode((Failure(identity=failed, actor="a", stage="reward", reason="-"),))
        )
        actor = actor_of(*options)
        assert (counted(actor).in_flight, counted(actor).orphaned, counted(actor).cut) == (1, 1, 2)
        await deliver(actor, [segment(given[0], 0, "cut"), segment(given[0], 1, "stop")])
        assert (counted(actor).ready, counted(actor).duplicates) == (1, 2)
        assert whole(await actor.take(0)) == batch
        await actor.publish(push(1), [], b"", 0)
        assert archive.open(tmp_path).batch(0) == batch
        (reissued,) = (one for one in await tickets(actor, 1, 1))
        assert reissued.identity == msgspec.structs.replace(given[1].identity, attempt=1)
        assert [inspection.inspect_prompt(tmp_path, prompt) for prompt in {one.identity.prompt for one in given}]

    asyncio.run(main())
    shown = capsys.readouterr().out
    assert "sample 0 attempt 0 segment 0: trained on by update 1: reward 0, 2 tokens" in shown
    assert "sample 0 attempt 0 segment 1: ready" in shown
    assert "attempt 0 segment 1: failed: reward: -" in shown


def test_an_engine_that_only_makes_dead_letters_ends_the_run_and_the_letters_are_kept(
    actor_of: Callable[..., QueueActor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        actor = actor_of("queue.batch_size=64")
        await made_version_0(actor)
        made = [broken(ticket, {"logprobs": [0.5, -1.0]}) for ticket in await tickets(actor, 0, 64)]
        with pytest.raises(TooManyFailures, match=r"100% of the last 64 .*: engine: a log-prob is positive: 0.5"):
            await deliver(actor, made)
        assert len(actor_of()._journal.dead_letters()) == 64

    asyncio.run(main())
    assert inspection.inspect_dead_letters(tmp_path, 2) == 0
    shown = capsys.readouterr().out
    assert "\n64 dead letters\n" in shown
    assert shown.count("by a: a log-prob is positive: 0.5\n  tokens      5 6") == 2


@pytest.mark.parametrize(("limit", "reason"), [(3, None), (2, "too long: a prompt of 3 tokens, and 2 are allowed")])
def test_prompts_are_as_long_as_the_data_task_allows(
    math_config: Callable[..., Config], tmp_path: Path, limit: int, reason: str | None
) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 17}}')
    task = DataTask(
        sources={"a": Source(data="x", max_prompt_tokens=limit), "b": Source(data="y", max_prompt_tokens=1)}
    )
    limits = read_token_limits(msgspec.structs.replace(math_config(), task=task), str(tmp_path))
    assert limits == TokenLimits(vocabulary=17, completion=5, prompt=limit)
    assert defect(trajectory([5]), limits) == reason


def test_with_an_environment_all_turns_together_have_its_limit(
    math_config: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 17}')
    environment = Environment(name="a:b", max_tokens=9)
    limits = read_token_limits(msgspec.structs.replace(math_config(), environment=environment), str(tmp_path))
    assert limits == TokenLimits(vocabulary=17, completion=9, prompt=None)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.advantage={kind='gdpo', weights={right=1.0}}"],
        ["algorithm.advantage.kind=rloo", "algorithm.zero_variance=resample", "algorithm.resample.component=right"],
    ],
    ids=["gdpo", "resample"],
)
def test_a_trajectory_without_a_component_that_is_compared_cannot_be_trained_on(
    math_config: Callable[..., Config], tmp_path: Path, overrides: list[str]
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 17}')
    limits = read_token_limits(math_config(*overrides, "queue.samples_per_prompt=4"), str(tmp_path))
    one = trajectory([5])
    assert defect(one, limits) == (
        "samples are compared by 'right', and its reward has no such component (there are none)"
    )
    assert defect(msgspec.structs.replace(one, components={"right": 0.0, "form": 1.0}), limits) is None


@pytest.mark.parametrize("content", ["{}", "not json"])
def test_a_model_that_does_not_say_how_many_tokens_it_has_is_named(
    math_config: Callable[..., Config], tmp_path: Path, content: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=f"{tmp_path}: its config.json does not say how many tokens it has"):
        read_token_limits(math_config(), str(tmp_path))


def test_those_who_wait_share_a_transaction(actor_of: Callable[..., QueueActor]) -> None:
    async def main() -> None:
        actor = actor_of("queue.batch_size=100")
        await actor.begin(0)
        before = actor._journal._number
        made = await sample(actor, 0, 50)
        await asyncio.gather(*(deliver(actor, [one]) for one in made))
        assert counted(actor).ready == 50
        # One each would be 50. How many come in one part depends on who else has the machine.
        assert actor._journal._number - before <= 25

    asyncio.run(main())


def test_after_stop_whoever_waits_for_a_batch_gets_none(actor_of: Callable[..., QueueActor]) -> None:
    async def main() -> None:
        actor = actor_of()
        waiting = asyncio.create_task(actor.take(0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await actor.stop()
        assert await waiting is None

    asyncio.run(main())


def test_after_stop_all_ranks_have_the_batch_that_one_of_them_has_and_nobody_a_new_one(
    actor_of: Callable[..., QueueActor],
) -> None:
    async def main() -> None:
        actor = actor_of()
        await made_version_0(actor)
        await deliver(actor, await sample(actor, 0, 8))
        batch = await actor.take(0)
        await actor.stop()
        assert whole(batch).version == 0
        assert await actor.take(0) == batch
        assert await actor.take(1) is None
        assert await actor.take(2) is None

    asyncio.run(main())


def test_a_stop_between_two_ranks_that_wait_for_the_same_batch_leaves_none_without_it(
    actor_of: Callable[..., QueueActor],
) -> None:
    async def main() -> None:
        actor = actor_of()
        await made_version_0(actor)
        made = await sample(actor, 0, 4)
        ranks = [asyncio.create_task(actor.take(0)) for _ in range(4)]
        await asyncio.sleep(0.05)
        # The first woken caller finds the run stopped as soon as it has the batch.
        take = actor._queue.take

        def take_and_stop(version: int, *, leased_only: bool = False) -> Batch | None:
            batch = take(version, leased_only=leased_only)
            actor._batches.stopped = batch is not None
            return batch

        actor._queue.take = take_and_stop
        await deliver(actor, made)
        answers = await asyncio.gather(*ranks)
        assert whole(answers[0]).version == 0
        assert all(one == answers[0] for one in answers)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_actor_that_calls_or_gives_a_sign_of_life_is_not_silent(
    actor_of: Callable[..., QueueActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(queue_actor, "time", clock)

    async def main() -> None:
        actor = actor_of()
        assert await actor.silent(["a", "b", "c"], 60.0) == []
        clock.now = 59.0
        assert await actor.silent(["a", "b", "c"], 60.0) == []
        await actor.deliver("a", 0, encode(()), encode(()))
        await actor.beat("c")
        clock.now = 61.0
        assert await actor.silent(["a", "b", "c", "new"], 60.0) == ["b"]

    asyncio.run(main())


def test_a_sign_of_life_is_answered_by_the_number_of_actors_that_sample(actor_of: Callable[..., QueueActor]) -> None:
    async def main() -> None:
        actor = actor_of()
        assert await actor.beat("a") == 0
        await actor.issue("a", 0, 1, 0)
        await actor.issue("b", 0, 1, 0)
        assert await actor.beat("a") == 2
        await actor.lost("b")
        assert await actor.beat("a") == 1

    asyncio.run(main())


def test_the_archive_in_the_place_of_the_queue_gives_the_archived_batches(
    actor_of: Callable[..., QueueActor], tmp_path: Path
) -> None:
    async def main() -> None:
        batch = await made_version_1(actor_of())
        source = ArchiveSource(str(tmp_path), put=as_it_is)
        assert whole(await source.take(0)) == batch
        await source.beat("learner")
        await source.publish(push(1), [], b"", 0)
        assert list(await source.digests()) == [1]

    asyncio.run(main())
