"""The Ray actor of a queue's shard: it holds the columns of trajectories; the queue holds only their records.

    rollout actor --trajectories--> shard --records--> rollout actor --records--> queue
    rank          <--its part of a batch-- shard <--the part's identities-- queue
    archive       <--its part of a batch-- shard

With K shards, prompt p belongs to shard p modulo K. So K processes receive, validate, journal, serve and archive
tokens, while only the queue applies the rules: admission, age and leases. A shard has no rules, and its journal is its
only state. So a call may be repeated, and a process that was marked dead but still runs does no harm.

    a trajectory is in its shard's journal before its record is in the queue's journal
    it is dropped after the queue's journal records that it is in the archive, or will never be trained on
"""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false

import asyncio
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

import msgspec
import numpy as np
import ray
from ray import ObjectRef

from streamppo import process
from streamppo.config.sections import Config
from streamppo.queue.replication import standby
from streamppo.queue.rules.slot import make_record
from streamppo.queue.rules.validation import TokenLimits, defects
from streamppo.queue.shards import batch_refs
from streamppo.queue.shards.batch_refs import BatchRef, BatchRefs, Put, Wanted
from streamppo.queue.store import archive
from streamppo.queue.store.archive import WrittenFile
from streamppo.queue.token_limits import read_token_limits
from streamppo.types import Batch, Identity, TokenRecord, Trajectory, WireStruct, decode, encode, floats, ints

RecordRef: TypeAlias = "ObjectRef[bytes]"
"""An encoded `TokenRecord` of a whole batch, in the object store."""
RECORD_S = 60.0
"""Seconds to wait for the token record. If its rank is unreachable, the ranks restart and publish a new record."""


class BatchPart(WireStruct, frozen=True):
    """One shard's trajectories: indices `rows` (int32) in the batch, whose row i has tokens ends[i] : ends[i + 1]."""

    version: int
    min_version: int
    rows: bytes
    identities: tuple[Identity, ...]
    ends: bytes


class QueueShard:
    """Shard `number` of the queue of the run in the folder `run`. Every method may be called twice."""

    def __init__(self, config: bytes, run: str, model_path: str, number: int, put: Put = batch_refs.put) -> None:
        process.log_to_stdout(f"queue-shard-{number}")
        self._config, self._model_path = decode(config, Config), model_path
        self._archive = Path(run) / "archive"
        self._bodies = standby.open_trajectory_store(Path(run), number, self._config)
        self._limits: TokenLimits | None = None
        self._refs = BatchRefs(put)
        self._process_id = uuid4().hex
        self._waiting: dict[Identity, bytes] = {}
        self._writing = asyncio.Lock()
        process.freeze_gc()

    @ray.method
    async def new_process_id(self, known: str) -> str:
        """Wait until the id of this process differs from `known`, and return it: callers detect a restart by it."""
        if self._process_id == known:
            await asyncio.Event().wait()
        return self._process_id

    @ray.method
    async def store(self, trajectories: bytes) -> bytes:
        """Journal the encoded trajectories without a defect; return the `TrajectoryRecord`s of all, in order."""
        if self._limits is None:
            self._limits = await asyncio.to_thread(read_token_limits, self._config, self._model_path)
        rows = [bytes(raw) for raw in decode(trajectories, tuple[msgspec.Raw, ...])]
        decoded = [decode(row, Trajectory) for row in rows]
        checked = zip(decoded, defects(decoded, self._limits), strict=True)
        records = tuple(make_record(trajectory, defect) for trajectory, defect in checked)
        await self._write(
            {trajectory.identity: row for trajectory, row in zip(records, rows, strict=True) if not trajectory.defect}
        )
        return encode(records)

    @ray.method
    async def take(self, part: bytes, wanted: Wanted) -> BatchRef:
        """Return what is `wanted` of a part; the rows of `wanted` are indices in the whole batch."""
        named = decode(part, BatchPart)
        return await self._refs.ref(named.version, wanted, lambda: self._batch(named))

    @ray.method
    async def archive(self, part: bytes, record_refs: "list[RecordRef]") -> bytes:
        """Write the part to the archive, with the learner's record of its tokens. Returns a `WrittenFile`."""
        async with asyncio.timeout(RECORD_S):
            numbers = decode(await record_refs[0], TokenRecord) if record_refs else TokenRecord()
        return encode(await asyncio.to_thread(self._write_part, decode(part, BatchPart), numbers))

    @ray.method
    async def drop(self, identities: bytes, first_prompt: int) -> None:
        await asyncio.to_thread(self._bodies.drop, decode(identities, tuple[Identity, ...]), first_prompt)

    @ray.method
    async def report(self) -> bytes:
        return encode(process.phase_times())

    async def _write(self, encoded: dict[Identity, bytes]) -> None:
        """Wait until these trajectories are in the journal. Calls during a transaction share the next transaction."""
        self._waiting |= encoded
        async with self._writing:
            if not self._waiting.keys() & encoded.keys():
                return
            together, self._waiting = self._waiting, {}
            try:
                await asyncio.to_thread(self._bodies.write, together)
            except BaseException:
                # Put the trajectories back, so that each waiting caller tries the write itself and raises its error.
                self._waiting = together | self._waiting
                raise

    def _batch(self, part: BatchPart) -> Batch:
        trajectories = tuple(self._bodies.read(part.identities))
        return Batch(version=part.version, min_version=part.min_version, rows=part.rows, trajectories=trajectories)

    def _write_part(self, part: BatchPart, record: TokenRecord) -> WrittenFile:
        ends = np.frombuffer(part.ends, dtype=np.int64).tolist()
        mine = [slice(ends[row], ends[row + 1]) for row in ints(part.rows).tolist()]
        columns = {name: floats(column) for name, column in msgspec.structs.asdict(record).items() if column}
        fields = {name: b"".join(column[tokens].tobytes() for tokens in mine) for name, column in columns.items()}
        return archive.write(self._archive, self._batch(part), TokenRecord(**fields))
