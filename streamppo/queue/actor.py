"""The Ray actor of the queue, with ledger, journal and archive. One event loop serves its calls; rules/ has its rules.

    consumes     trajectories and failures from rollout actors, versions from the learner
    produces     tickets, batches, weights; the journal and the archive
    waits for    only the disk; its callers wait here for tickets, batches and versions (waiters.py)

    A change is in the journal before it is acknowledged: calls that arrive during a transaction share the next one.
    A batch is in the archive, with the learner's record of its tokens, before its version is published.

Queue and ledger share a process, so that publishing is one step: the version becomes known, the lease of its batch
ends, and engines can pull it. With shards (shard.py), this process holds only records. A restarted process prevents its
predecessor from writing and rebuilds the queue from the journal; the learner pushes the weights again.
"""
# pyright: reportUnknownMemberType=false

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

import ray
from msgspec import structs

from streamppo import process
from streamppo.config.diff import differ
from streamppo.config.sections import Config
from streamppo.errors import DIVERGENCE_CAUSES, Diverged, QueueError
from streamppo.queue import report, resume_checks
from streamppo.queue.batch_source import ArchivedRuns
from streamppo.queue.group_commit import Commits, Transaction
from streamppo.queue.replication import standby
from streamppo.queue.rules.records import ArchivedBatch, PublishedVersion
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.slot import TrajectoryRecord
from streamppo.queue.rules.state import queue_settings
from streamppo.queue.shards import batch_refs
from streamppo.queue.shards.batch_refs import BatchRef, BatchRefs, Put, Wanted
from streamppo.queue.shards.shards import Shards
from streamppo.queue.store import snapshot
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.token_limits import read_token_limits
from streamppo.queue.waiters import BatchWaiters, Polls, TicketLine, VersionWaiters
from streamppo.tasks.order import RowNumbers
from streamppo.types import Batch, Failure, Push, TokenRecord, Trajectory, decode, encode
from streamppo.weights.ledger import Ledger, PublishReply
from streamppo.weights.shares import EncodedRecord, RankShare, ShareCollector
from streamppo.weights.transport import BucketRef

log = logging.getLogger(__name__)
PushedRefs: TypeAlias = "tuple[bytes, list[BucketRef]]"
"""An encoded `Push` and the references of its buckets."""
POLL_S = 5.0
"""After this many seconds a long poll returns empty, so that no call of a dead caller waits forever."""


class QueueActor(ArchivedRuns):
    """The queue's actor. Ray repeats calls when its process dies: each method may run twice with the same arguments."""

    def __init__(
        self,
        config: bytes,
        run: str,
        model_path: str,
        put: Put = batch_refs.put,
        shards: Callable[[Config], Shards] = Shards.attach,
    ) -> None:
        process.log_to_stdout("queue")
        self.config = decode(config, Config)
        self._model_path = model_path
        resume_checks.refuse_without_journal(Path(run))
        self._journal = standby.open_journal(Path(run), self.config)
        self._journal.fence()
        settings = queue_settings(self.config)
        self._queue = QueueRules(settings, snapshot.read_state(settings, self._journal))
        self._published = self._journal.versions()
        self._archive = Archive(Path(run) / "archive", checksums(self._published.values()))
        self._archive.sweep()
        self._archiving: dict[int, asyncio.Task[ArchivedBatch]] = {}
        self._ledger = Ledger[PushedRefs]()
        self._shares = ShareCollector(self._publish)
        self._learner = 0
        self._tickets, self._batches = TicketLine(self._queue), BatchWaiters(self._queue)
        self._versions = VersionWaiters()
        self._refs, self._shards = BatchRefs(put), shards(self.config)
        self._commits = Commits(self._queue, self._write_transaction, self._drop_from_shards, self._first_prompt)
        self._polls = Polls(POLL_S)
        self._last_call_s: dict[str, float] = {}
        self._process_id = uuid4().hex
        process.freeze_gc()

    # --- the driver's side -----------------------------------------------------------------------------------

    @ray.method
    async def begin(self, version: int) -> int:
        """Begin for a new driver with a learner at `version`; return the newest version. Raises `CheckpointError`."""
        self._queue.reopen_all()
        self._tickets.clear()
        before, newest = resume_checks.newest_config(self._journal), self._queue.state.version
        resume_checks.refuse_changed_settings(before, self.config)
        if version < newest:
            log.info("updates to versions %d to %d are repeated, as first configured", version + 1, newest)
        if before is None or differ(before, self.config):
            self._journal.configure(newest, encode(self.config))
        await self._commits.commit()
        return self._queue.state.version

    @ray.method
    async def new_process_id(self, known: str) -> str:
        while self._process_id == known:
            await asyncio.sleep(POLL_S)
        return self._process_id

    @ray.method
    async def silent(self, actors: list[str], limit_s: float) -> list[str]:
        present = time.monotonic()
        return [actor for actor in actors if present - self._last_call_s.setdefault(actor, present) > limit_s]

    @ray.method
    async def lost(self, actor: str) -> None:
        """Mark `actor` as dead: its tickets go to other actors, and it never gets new tickets."""
        self._queue.mark_dead(actor)
        self._tickets.refuse_dead(actor)
        self._serve()
        await self._commits.commit()

    @ray.method
    async def stop(self) -> None:
        """Lease no more batches: a rank that waits for a batch, or requests a new one, gets None."""
        self._batches.stopped = True
        self._serve()

    @ray.method
    async def forget(self, before: int) -> None:
        """Delete archived batches of versions below `before`, and endings at slots older than all slots in use."""
        archived = [
            version.archived for version in self._published.values() if version.archived and version.version > before
        ]
        if len(archived) == len(self._archive.checksums):
            return
        samples = self._queue.settings.samples_per_prompt
        first_held = self._queue.state.first_prompt(samples)
        first_slot = min([first_held, *(batch.first_prompt for batch in archived)]) * samples
        async with self._commits.write_lock:
            await asyncio.to_thread(self._journal.forget, before, first_slot)
        await asyncio.to_thread(self._archive.drop, before)

    @ray.method
    async def report(self) -> bytes:
        phases = process.sum_phases([process.phase_times(), *await self._shards.phase_times()])
        return encode(structs.replace(report.report(self._queue.state), phases=phases))

    @ray.method
    async def waiting_for(self) -> str:
        return report.waiting_for(self._queue.settings, self._queue.state)

    # --- rollout's side --------------------------------------------------------------------------------------

    @ray.method
    async def issue(self, actor: str, engine_version: int, limit: int, call: int) -> bytes:
        """Wait for tickets; return up to `limit`, none after a timeout. A repeated `call` gets the same tickets."""
        self._note_call(actor, engine_version)
        try:
            async with self._polls.bound_wait():
                tickets = await self._tickets.tickets(actor, engine_version, limit, call)
        except TimeoutError:
            return encode(())
        await self._commits.commit()
        return encode(tickets)

    @ray.method
    async def map_rows(self, rows: bytes) -> None:
        """Receive from a starting actor which data row each prompt has (`RowNumbers`), for `algorithm.curriculum`."""
        if self._queue.curriculum is not None:
            self._queue.curriculum.map_rows(decode(rows, RowNumbers))
        await self._commits.commit()

    @ray.method
    async def beat(self, actor: str) -> int:
        self._last_call_s[actor] = time.monotonic()
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
        """Journal a delivery: results of `actor` since its last delivery. Return up to `limit` tickets without a wait.

        `cut_for` is the newest version for which `actor` has cut all due segments.
        """
        self._last_call_s[actor] = time.monotonic()
        if self._queue.limits is None and not self._shards:
            self._queue.limits = await asyncio.to_thread(read_token_limits, self.config, self._model_path)
        try:
            self._store(actor, cut_for, trajectories, failures)
            tickets = self._tickets.available(actor, engine_version, limit, call) if limit else ()
        finally:
            # Commit even if TooManyFailures is raised, so that the dead letters with the reasons are kept.
            await self._commits.commit()
        return encode(tickets)

    @ray.method
    async def weights_after(self, actor: str, version: int, have: int) -> "list[PushedRefs]":
        """Wait for a version above the engine's `version`; return the pushes from `have` (-1: none) to it, or none."""
        self._note_call(actor, version)
        if (newest := self._newest()) is None or newest <= version:
            with suppress(TimeoutError):
                async with self._polls.bound_wait():
                    await self._versions.above(version)
            if (newest := self._newest()) is None or newest <= version:
                return []
        return [entry.handle for entry in self._ledger.versions_after(have)]

    # --- the learner's side ----------------------------------------------------------------------------------

    @ray.method
    async def take(self, version: int, wanted: Wanted = "whole") -> "list[BatchRef] | None":
        if version < self._queue.state.version:
            # Wait for the transaction that gives the archive's files their final names.
            await self._commits.commit()
            return [await self._refs.ref(version, wanted, lambda: self._archive.batch(version))]
        future = self._batches.batch(version)
        # Taking a batch may have reopened slots of trajectories that are too old.
        self._tickets.serve()
        if (batch := await asyncio.shield(future)) is None:
            return None
        await self._commits.commit()
        if self._shards:
            return await self._shards.take(batch, wanted)
        return [await self._refs.ref(version, wanted, lambda: batch)]

    @ray.method
    async def publish(self, push: bytes, refs: "list[BucketRef]", record: EncodedRecord, learner: int) -> bytes:
        """See `BatchSource.publish`; archives and consumes the batch that made the version before engines can pull it.

        With `learner.exact`, a version that is published again must have its first weights. Raises `Diverged` if they
        differ, `QueueError` for a learner marked as dead, and `WeightsError` if the shares are not of one version.
        """
        share = RankShare(decode(push, Push), refs, record)
        if learner < self._learner:
            raise QueueError(f"version {share.push.version} comes from learner {learner}, which was marked dead")
        if learner > self._learner:
            # The buckets of the dead learner's process are lost.
            self._learner, self._ledger = learner, Ledger[PushedRefs]()
            self._shares = ShareCollector(self._publish)
        return encode(await self._shares.result(share))

    def _store(self, actor: str, cut_for: int, trajectories: bytes, failures: bytes) -> None:
        """Store a delivery, then serve the waiting callers, which take precedence over the delivering actor."""
        try:
            if self._shards:
                self._queue.put_records(decode(trajectories, tuple[TrajectoryRecord, ...]))
            else:
                self._queue.put(decode(trajectories, tuple[Trajectory, ...]))
            for failure in decode(failures, tuple[Failure, ...]):
                self._queue.fail(failure)
            self._queue.cut_for(actor, cut_for)
        finally:
            self._serve()

    async def _publish(self, share: "RankShare[BucketRef]") -> PublishReply:
        push, refs, record = share
        version, digest, ledger = push.version, push.digest, self._ledger
        archived = (
            await self._archive_batch(version - 1, record) if version and version not in self._published else None
        )
        published = self._published.get(version)
        if published is None:
            trajectories = self._queue.leased_batch(version - 1).trajectories if version else ()
            self._queue.publish(version, push.admitted_lag)
            self._serve()
            self._published[version] = PublishedVersion(version=version, digest=digest, archived=archived)
            self._commits.publish(self._published[version], [trajectory.identity for trajectory in trajectories])
            self._archiving.pop(version - 1, None)
        elif published.digest != digest and resume_checks.is_exact(resume_checks.configs(self._journal), version):
            raise Diverged(
                f"version {version} was redone and has other weights ({digest[:12]}, first "
                f"{published.digest[:12]}): {DIVERGENCE_CAUSES}"
            )
        await self._commits.commit()
        ledger.publish(push, (encode(push), refs))
        if (newest := self._newest()) is not None:
            self._versions.wake(newest)
        return ledger.reply_to(digest)

    def _newest(self) -> int | None:
        """The newest version that engines can pull; None while a learner repeats updates."""
        newest = self._ledger.newest
        return newest if newest is not None and newest >= self._queue.state.version else None

    def _serve(self) -> None:
        """Serve the waiting callers after a change. Batches come first, because taking one may reopen slots."""
        self._batches.serve()
        self._tickets.serve()

    def _write_transaction(self, transaction: Transaction) -> None:
        self._journal.write(transaction.changes, transaction.versions, self._archive.settle)

    def _first_prompt(self) -> int:
        return self._queue.state.first_prompt(self._queue.settings.samples_per_prompt) if self._shards else 0

    def _drop_from_shards(self, transaction: Transaction) -> None:
        consumed, ended = transaction.consumed, transaction.changes.ended
        if self._shards and (consumed or ended):
            self._shards.drop([*consumed, *(attempt.identity for attempt in ended)], transaction.horizon)

    async def _archive_batch(self, version: int, record: EncodedRecord) -> ArchivedBatch:
        """Write a leased batch to the archive once; later calls return the same record, or repeat a failed write."""
        if version not in self._archiving:
            self._archiving[version] = asyncio.create_task(self._write_batch(self._queue.leased_batch(version), record))
        task = self._archiving[version]
        await asyncio.wait([task])
        if task.exception() is not None and self._archiving.get(version) is task:
            del self._archiving[version]
        return task.result()

    async def _write_batch(self, batch: Batch, record: EncodedRecord) -> ArchivedBatch:
        if self._shards:
            refs = [] if isinstance(record, bytes) else record
            return self._archive.gather(batch.version, await self._shards.archive(batch, refs))
        numbers = decode(record, TokenRecord) if isinstance(record, bytes) and record else TokenRecord()
        return await asyncio.to_thread(self._archive.write, batch, numbers)

    def _note_call(self, actor: str, engine_version: int) -> None:
        self._last_call_s[actor] = time.monotonic()
        self._tickets.note_version(actor, engine_version)
