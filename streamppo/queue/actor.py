"""The Ray actor around queue, ledger, journal and archive: a mailbox, one event loop, no rules of its own.

    consumes     trajectories and failures from rollout actors, versions from the learner
    produces     tickets, batches, weights; the journal and the archive
    waits for    nothing but the disk; its callers wait here, each for what it asked for (waiting.py)

    nothing is acknowledged before it is in the journal: callers that come while one transaction runs share the next
    no version is published before the batch that made it is in the archive, with the learner's numbers of it

Queue and ledger share a process, so that a version becomes known, ends the lease of the batch that made it and lets
engines pull it in one step. A queue with shards (shard.py) has records alone: tokens pass this process by. A new
process fences out the one before it and rebuilds the queue from the journal; the learner brings the weights again.
"""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from uuid import uuid4

import msgspec
import ray
from msgspec import structs

from streamppo import process
from streamppo.config.diff import learning
from streamppo.config.sections import Config
from streamppo.errors import Diverged, QueueError
from streamppo.queue import report, resume_checks
from streamppo.queue.batch_source import ArchivedRuns
from streamppo.queue.group_commit import Commits, Transaction
from streamppo.queue.replication import standby
from streamppo.queue.rules.records import ArchivedBatch, PublishedVersion
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.slot import TrajectoryRecord
from streamppo.queue.rules.state import QueueSettings, QueueState, settings_of
from streamppo.queue.shards import batch_refs
from streamppo.queue.shards.batch_refs import BatchRef, Handout, Put
from streamppo.queue.shards.shards import Shards
from streamppo.queue.store import snapshot
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.store.journal import Journal
from streamppo.queue.token_limits import limits_of
from streamppo.queue.waiters import BatchWaiters, Polls, TicketLine, VersionWaiters
from streamppo.types import Batch, Failure, Identity, Push, TokenRecord, Trajectory, decode, encode
from streamppo.weights.ledger import Ledger, PublishReply
from streamppo.weights.shares import EncodedRecord, RankShare, ShareCollector

if TYPE_CHECKING:
    from streamppo.weights.transport import BucketRef

log = logging.getLogger(__name__)
PushedRefs: TypeAlias = "tuple[bytes, list[BucketRef]]"
"""An encoded `Push`, and the references of its buckets."""
POLL_S = 5.0
"""A long poll comes back empty after this, so that a caller that has died does not wait here for ever."""


class QueueActor(ArchivedRuns):
    """Every method is safe to call twice with the same arguments: Ray repeats calls when this process dies."""

    def __init__(
        self,
        config: bytes,
        run: str,
        model_path: str,
        put: Put = batch_refs.put,
        shards: Callable[[Config], Shards] = Shards.attach,
    ) -> None:
        process.log_to_stdout("queue")
        self.config = msgspec.msgpack.decode(config, type=Config)
        self._model_path = model_path
        resume_checks.refuse_without_journal(Path(run))
        self._journal = standby.journal_of(Path(run), self.config)
        self._journal.fence()
        self._queue = _rebuilt(settings_of(self.config), self._journal)
        self._made = self._journal.versions()
        self._archive = Archive(Path(run) / "archive", checksums(self._made.values()))
        self._archive.sweep()
        self._archiving: dict[int, asyncio.Task[ArchivedBatch]] = {}
        self._ledger = Ledger[PushedRefs]()
        self._joining = ShareCollector(self._publish)
        self._learner = 0
        self._tickets, self._batches = TicketLine(self._queue), BatchWaiters(self._queue)
        self._versions = VersionWaiters()
        self._handout, self._shards = Handout(put), shards(self.config)
        self._commits = Commits(self._queue, self._write_down, self._drop, self._first_prompt)
        self._polls = Polls(POLL_S)
        self._heard: dict[str, float] = {}
        self._life = uuid4().hex
        process.freeze_gc()

    # --- the driver's side -----------------------------------------------------------------------------------

    @ray.method
    async def begin(self, version: int) -> int:
        """Begin anew with a driver whose learner starts from `version`: nobody samples. Returns the newest version.

        Versions between the two are made again, each with the configuration that it was made with. Raises
        `CheckpointError` if the configuration changes what a run keeps.
        """
        self._queue.lost_all()
        self._tickets.lost_all()
        before, newest = resume_checks.newest_config(self._journal), self._queue.state.version
        resume_checks.refuse_other(before, self.config)
        if version < newest:
            log.info("versions %d to %d are made again, as they were made", version + 1, newest)
        if before is None or learning(before) != learning(self.config):
            self._journal.configure(newest, msgspec.msgpack.encode(self.config))
        await self._commits.commit()
        return self._queue.state.version

    @ray.method
    async def another_life(self, known: str) -> str:
        """The name of this process, as soon as it is not `known`: that is how a restart is noticed."""
        while self._life == known:
            await asyncio.sleep(POLL_S)
        return self._life

    @ray.method
    async def silent(self, actors: list[str], limit_s: float) -> list[str]:
        """The names of `actors` that have not called for `limit_s`."""
        present = time.monotonic()
        return [actor for actor in actors if present - self._heard.setdefault(actor, present) > limit_s]

    @ray.method
    async def lost(self, actor: str) -> None:
        """Have others sample again what `actor` was sampling; it never gets another ticket."""
        self._queue.mark_dead(actor)
        self._tickets.refuse_dead(actor)
        self._serve()
        await self._commits.commit()

    @ray.method
    async def stop(self) -> None:
        """Lease no more batches: a rank that waits for one, or asks for a new one, gets none."""
        self._batches.stopped = True
        self._serve()

    @ray.method
    async def forget(self, before: int) -> None:
        """Drop the archived batches of versions below `before`, and the endings of attempts that are older."""
        kept = [made.archived for made in self._made.values() if made.archived and made.version > before]
        if len(kept) == len(self._archive.checksums):
            return
        samples = self._queue.settings.samples_per_prompt
        first_held = self._queue.state.first_prompt(samples)
        first_slot = min([first_held, *(one.first_prompt for one in kept)]) * samples
        async with self._commits.alone:
            await asyncio.to_thread(self._journal.forget, before, first_slot)
        await asyncio.to_thread(self._archive.drop, before)

    @ray.method
    async def report(self) -> bytes:
        """The queue's counters."""
        phases = process.sum_phases([process.spent(), *await self._shards.phase_times()])
        return encode(structs.replace(report.report(self._queue.state), phases=phases))

    @ray.method
    async def waiting_for(self) -> str:
        """One sentence for the watchdog: what the next batch waits for."""
        return report.waiting_for(self._queue.settings, self._queue.state)

    # --- rollout's side --------------------------------------------------------------------------------------

    @ray.method
    async def issue(self, actor: str, engine_version: int, limit: int, call: int) -> bytes:
        """Up to `limit` tickets, as soon as there is one; none after a while.

        A swap may happen while the call waits here: `weights_after` says so, and admits more. An actor counts `call` up
        when it has received tickets; until then it gets the same ones again.
        """
        self._hear(actor, engine_version)
        try:
            async with self._polls.bound_wait():
                tickets = await self._tickets.tickets(actor, engine_version, limit, call)
        except TimeoutError:
            return encode(())
        await self._commits.commit()
        return encode(tickets)

    @ray.method
    async def beat(self, actor: str) -> int:
        """Note that `actor` lives. Returns the number of actors that sample."""
        self._heard[actor] = time.monotonic()
        return len(self._queue.state.issued)

    @ray.method
    async def deliver(
        self,
        actor: str,
        cut_for: int,
        trajectories: bytes,
        failures: bytes,
        *,
        engine_version: int = -1,
        limit: int = 0,
        call: int = 0,
    ) -> bytes:
        """Store all that `actor` has finished since it last called; in the journal when this returns.

        All segments that were due to be cut for the version `cut_for` have come with it. A queue with shards gets
        records as `trajectories`. Returns what `issue` would for the other arguments, but never waits for a ticket:
        one call, and one transaction, for both.
        """
        self._heard[actor] = time.monotonic()
        if self._queue.limits is None and not self._shards:
            self._queue.limits = await asyncio.to_thread(limits_of, self.config, self._model_path)
        try:
            self._store(actor, cut_for, trajectories, failures)
            tickets = self._tickets.at_once(actor, engine_version, limit, call) if limit else ()
        finally:
            # If these were too many failures, the letters that say why are kept.
            await self._commits.commit()
        return encode(tickets)

    @ray.method
    async def weights_after(self, actor: str, version: int, have: int) -> "list[PushedRefs]":
        """Return, in order, all that version `have` (-1: nothing) needs to become the newest version.

        It comes as soon as there is one above `version`, which the engine holds; nothing after a while.
        """
        self._hear(actor, version)
        if (newest := self._newest()) is None or newest <= version:
            with suppress(TimeoutError):
                async with self._polls.bound_wait():
                    await self._versions.above(version)
            if (newest := self._newest()) is None or newest <= version:
                return []
        return [entry.handle for entry in self._ledger.versions_after(have)]

    # --- the learner's side ----------------------------------------------------------------------------------

    @ray.method
    async def take(self, version: int) -> "list[BatchRef] | None":
        """The batch of the update that starts at `version`, as soon as it is whole, in parts; None after `stop`.

        A batch that one rank has got before `stop` all ranks get. A batch that was trained on comes from the archive.
        """
        return await self._hand_out(version, lambda read: self._handout.batch(version, read), self._shards.take)

    @ray.method
    async def outline(self, version: int) -> "list[BatchRef] | None":
        """The outline of the same batch, in the same way, for a rank that reads some of its rows."""
        return await self._hand_out(version, lambda read: self._handout.outline(version, read), self._shards.outline)

    @ray.method
    async def tokens(self, version: int, rows: bytes) -> "list[BatchRef] | None":
        """The token ids of the trajectories at `rows` (int32) of the same batch, in the same way."""
        return await self._hand_out(
            version,
            lambda read: self._handout.tokens(version, rows, read),
            lambda batch: self._shards.tokens(batch, rows),
        )

    @ray.method
    async def publish(self, push: bytes, refs: "list[BucketRef]", learned: EncodedRecord, learner: int) -> bytes:
        """Publish a version, once every rank has called with its share: archive and consume its batch, free its slots,
        and let engines pull its weights. Returns a `PublishReply`, to all ranks.

        `learned` is the encoded `TokenRecord` of its batch; empty without a batch. A version that was published before
        must have the same weights again where `learner.exact` held for it, and keeps its first digest elsewhere. Raises
        `Diverged` if it has others, `QueueError` for a learner that was given up for dead, and `WeightsError` if the
        shares are not those of one version.
        """
        share = RankShare(decode(push, Push), refs, learned)
        if learner < self._learner:
            raise QueueError(f"version {share.push.version} comes from learner {learner}, which was given up for dead")
        if learner > self._learner:
            # Weights of a learner that has died are gone with it.
            self._learner, self._ledger = learner, Ledger[PushedRefs]()
            self._joining = ShareCollector(self._publish)
        return encode(await self._joining.result(share))

    # --- the pieces ------------------------------------------------------------------------------------------

    def _store(self, actor: str, cut_for: int, trajectories: bytes, failures: bytes) -> None:
        """Store a delivery, and give what it has made to those that wait: they come before who delivers."""
        try:
            if self._shards:
                self._queue.put_records(decode(trajectories, tuple[TrajectoryRecord, ...]))
            else:
                self._queue.put_all(decode(trajectories, tuple[Trajectory, ...]))
            for failure in decode(failures, tuple[Failure, ...]):
                self._queue.fail(failure)
            self._queue.cut_for(actor, cut_for)
        finally:
            self._serve()

    async def _publish(self, whole: "RankShare[BucketRef]") -> PublishReply:
        described, refs, learned = whole
        version, digest, ledger = described.version, described.digest, self._ledger
        archived = await self._archive_of(version - 1, learned) if version and version not in self._made else None
        known = self._made.get(version)
        if known is None:
            consumed = _names(self._queue.leased_batch(version - 1)) if version else []
            self._queue.publish(version, described.admitted_lag)
            self._serve()
            self._made[version] = PublishedVersion(version=version, digest=digest, archived=archived)
            self._commits.publish(self._made[version], consumed)
            self._archiving.pop(version - 1, None)
        elif known.digest != digest and resume_checks.is_exact(resume_checks.configs(self._journal), version):
            raise Diverged(
                f"version {version} was made again and has other weights ({digest[:12]}, first "
                f"{known.digest[:12]}): the software, the device or the number of ranks is another one"
            )
        await self._commits.commit()
        ledger.publish(described, (encode(described), refs))
        if (newest := self._newest()) is not None:
            self._versions.wake(newest)
        return ledger.reply_to(digest)

    def _newest(self) -> int | None:
        """The newest version that engines can pull; none while a learner makes again what was there before."""
        newest = self._ledger.newest
        return newest if newest is not None and newest >= self._queue.state.version else None

    async def _hand_out(
        self,
        version: int,
        whole: Callable[[Callable[[], Batch]], Awaitable[BatchRef]],
        by_shards: Callable[[Batch], Awaitable[list[BatchRef]]],
    ) -> list[BatchRef] | None:
        """Wait for a batch, and hand it out: `whole`, with a function that reads it, or `by_shards`.

        None after `stop`.
        """
        if version < self._queue.state.version:
            # The files have their names when their version is in the journal.
            await self._commits.commit()
            return [await whole(lambda: self._archive.batch(version))]
        found = self._batches.batch(version)
        # Trajectories that were too old for it are to be sampled again.
        self._tickets.serve()
        if (batch := await asyncio.shield(found)) is None:
            return None
        await self._commits.commit()
        return await by_shards(batch) if self._shards else [await whole(lambda: batch)]

    def _serve(self) -> None:
        """Give what a change has made to those that wait for it; a batch first, which may open slots again."""
        self._batches.serve()
        self._tickets.serve()

    def _write_down(self, one: Transaction) -> None:
        """Write a transaction. Files of the archive get their names within it."""
        self._journal.write(one.changes, one.made, self._archive.settle)

    def _first_prompt(self) -> int:
        """The first prompt of which the shards need anything."""
        return self._queue.state.first_prompt(self._queue.settings.samples_per_prompt) if self._shards else 0

    def _drop(self, one: Transaction) -> None:
        """Have the shards drop what a transaction has ended."""
        if self._shards and (one.consumed or one.changes.ended):
            self._shards.drop([*one.consumed, *(ended.identity for ended in one.changes.ended)], one.horizon)

    async def _archive_of(self, version: int, learned: EncodedRecord) -> ArchivedBatch:
        """Write a leased batch, once; what failed is begun anew by the next call."""
        if version not in self._archiving:
            self._archiving[version] = asyncio.create_task(self._write(self._queue.leased_batch(version), learned))
        task = self._archiving[version]
        await asyncio.wait([task])
        if task.exception() is not None and self._archiving.get(version) is task:
            del self._archiving[version]
        return task.result()

    async def _write(self, batch: Batch, learned: EncodedRecord) -> ArchivedBatch:
        if self._shards:
            told = [] if isinstance(learned, bytes) else learned
            return self._archive.gather(batch.version, await self._shards.archive(batch, told))
        numbers = decode(learned, TokenRecord) if isinstance(learned, bytes) and learned else TokenRecord()
        return await asyncio.to_thread(self._archive.write, batch, numbers)

    def _hear(self, actor: str, engine_version: int) -> None:
        self._heard[actor] = time.monotonic()
        self._tickets.hear(actor, engine_version)


def _names(batch: Batch) -> list[Identity]:
    return [trajectory.identity for trajectory in batch.trajectories]


def _rebuilt(settings: QueueSettings, journal: Journal) -> QueueRules:
    """The queue as of the journal's last transaction; a new one where there is none."""
    saved = journal.read()
    if saved is None:
        return QueueRules(settings, QueueState())
    state = snapshot.rebuild(settings, saved, journal.path)
    log.info("rebuilt from its journal, at version %d with %d slots", state.version, len(saved.slots))
    return QueueRules(settings, state)
