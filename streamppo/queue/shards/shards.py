"""The client of a queue's shards, for the queue and the rollout actors: it sends each call to the right shards."""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import asyncio
from collections.abc import Sequence

import numpy as np
import ray
from ray.actor import ActorProxy

from streamppo.config.sections import Config
from streamppo.process import PhaseTime
from streamppo.queue.rules.slot import TrajectoryRecord
from streamppo.queue.shards.batch_refs import BatchRef, Wanted
from streamppo.queue.shards.shard import BatchPart, QueueShard, RecordRef
from streamppo.queue.store.archive import WrittenFile
from streamppo.types import Batch, Identity, Trajectory, decode, encode


def name(number: int) -> str:
    """The name of a shard's Ray actor."""
    return f"queue-shard-{number}"


def numbers(config: Config) -> range:
    """The numbers of a queue's shards; empty if the queue holds the trajectories itself."""
    return range(config.queue.shards if config.queue.shards > 1 else 0)


class Shards:
    """All shards of a queue; empty (and false) if the queue holds the trajectories itself."""

    def __init__(self, actors: "Sequence[ActorProxy[QueueShard]]") -> None:
        self._actors = list(actors)

    @classmethod
    def attach(cls, config: Config) -> "Shards":
        # Ray restarts the queue with its old arguments. References in these may be lost by then; names stay valid.
        return cls([ray.get_actor(name(number)) for number in numbers(config)])

    def __bool__(self) -> bool:
        return bool(self._actors)

    async def store(self, trajectories: Sequence[Trajectory]) -> tuple[TrajectoryRecord, ...]:
        """Send each trajectory to its shard; return the records in the order of the trajectories."""
        rows = self._rows([trajectory.identity for trajectory in trajectories])
        sent = [
            self._actors[shard].store.remote(encode(tuple(trajectories[row] for row in mine))) for shard, mine in rows
        ]
        records: dict[int, TrajectoryRecord] = {}
        for (_, mine), stored in zip(rows, await asyncio.gather(*sent), strict=True):
            records.update(zip(mine, decode(stored, tuple[TrajectoryRecord, ...]), strict=True))
        return tuple(records[row] for row in range(len(trajectories)))

    async def take(self, batch: Batch, wanted: Wanted) -> list[BatchRef]:
        """Return references to the parts of a batch, one from each shard that has a part; `batch` has the records."""
        parts = self._parts(batch)
        return await asyncio.gather(*(self._actors[shard].take.remote(part, wanted) for shard, part in parts))

    async def archive(self, batch: Batch, record_refs: "list[RecordRef]") -> list[WrittenFile]:
        """Make the shards write their parts of a batch to the archive, each under a temporary name."""
        parts = self._parts(batch)
        answers = await asyncio.gather(
            *(self._actors[shard].archive.remote(part, record_refs) for shard, part in parts)
        )
        return [decode(answer, WrittenFile) for answer in answers]

    def drop(self, identities: Sequence[Identity], first_prompt: int) -> None:
        """Tell the shards to delete these, and all of prompts below `first_prompt`, if an earlier call was lost."""
        by_shard = {shard: tuple(identities[row] for row in rows) for shard, rows in self._rows(identities)}
        for number, actor in enumerate(self._actors):
            actor.drop.remote(encode(by_shard.get(number, ())), first_prompt)

    async def phase_times(self) -> list[dict[str, PhaseTime]]:
        answers = await asyncio.gather(*(actor.report.remote() for actor in self._actors))
        return [decode(answer, dict[str, PhaseTime]) for answer in answers]

    def _rows(self, identities: Sequence[Identity]) -> list[tuple[int, list[int]]]:
        by_shard: dict[int, list[int]] = {}
        for row, identity in enumerate(identities):
            by_shard.setdefault(identity.prompt % len(self._actors), []).append(row)
        return sorted(by_shard.items())

    def _parts(self, batch: Batch) -> list[tuple[int, bytes]]:
        records = batch.trajectories
        ends = np.cumsum([0, *(record.num_tokens for record in records)]).astype("<i8").tobytes()
        return [
            (
                shard,
                encode(
                    BatchPart(
                        version=batch.version,
                        min_version=batch.min_version,
                        rows=np.array(rows, dtype="<i4").tobytes(),
                        identities=tuple(records[row].identity for row in rows),
                        ends=ends,
                    )
                ),
            )
            for shard, rows in self._rows([record.identity for record in records])
        ]
