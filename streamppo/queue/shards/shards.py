"""A queue's shards, as the queue and the rollout actors see them: who has what, and all of them at once."""
# Ray leaves parts of its signatures untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import ray

from streamppo.config.sections import Config
from streamppo.process import PhaseTime
from streamppo.queue.rules.slot import TrajectoryRecord
from streamppo.queue.shards.batch_refs import BatchRef
from streamppo.queue.shards.shard import BatchPart, LearnedRef
from streamppo.queue.store.archive import WrittenFile
from streamppo.types import Batch, Identity, Trajectory, decode, encode

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.shards.shard import QueueShard


def name(number: int) -> str:
    """The name of the actor of a shard."""
    return f"queue-shard-{number}"


def numbers(config: Config) -> range:
    """The numbers of a queue's shards; none if the queue has the trajectories itself."""
    return range(config.queue.shards if config.queue.shards > 1 else 0)


class Shards:
    """All shards of a queue; none if the queue has the trajectories itself."""

    def __init__(self, actors: "Sequence[ActorProxy[QueueShard]]") -> None:
        self._actors = list(actors)

    @classmethod
    def attach(cls, config: Config) -> "Shards":
        """The shards of the run that this process is a part of; they have been made already."""
        # An actor that Ray starts again must not be made of references, which may be gone by then.
        return cls([ray.get_actor(name(number)) for number in numbers(config)])

    def __bool__(self) -> bool:
        return bool(self._actors)

    async def store(self, trajectories: Sequence[Trajectory]) -> tuple[TrajectoryRecord, ...]:
        """Give each trajectory to its shard; returns their records in their order."""
        rows = self._rows([one.identity for one in trajectories])
        sent = [
            self._actors[shard].store.remote(encode(tuple(trajectories[row] for row in mine))) for shard, mine in rows
        ]
        records: dict[int, TrajectoryRecord] = {}
        for (_, mine), stored in zip(rows, await asyncio.gather(*sent), strict=True):
            records.update(zip(mine, decode(stored, tuple[TrajectoryRecord, ...]), strict=True))
        return tuple(records[row] for row in range(len(trajectories)))

    async def take(self, batch: Batch) -> list[BatchRef]:
        """The parts of a batch of records."""
        return await asyncio.gather(*(self._actors[shard].take.remote(part) for shard, part in self._parts(batch)))

    async def outline(self, batch: Batch) -> list[BatchRef]:
        """The outlines of its parts."""
        return await asyncio.gather(*(self._actors[shard].outline.remote(part) for shard, part in self._parts(batch)))

    async def tokens(self, batch: Batch, rows: bytes) -> list[BatchRef]:
        """The tokens of `rows` (int32), by the shards that have some of them or none."""
        parts = self._parts(batch)
        return await asyncio.gather(*(self._actors[shard].tokens.remote(part, rows) for shard, part in parts))

    async def archive(self, batch: Batch, learned: "list[LearnedRef]") -> list[WrittenFile]:
        """Have the parts of a batch written to the archive, each to a file without a name."""
        parts = self._parts(batch)
        answers = await asyncio.gather(*(self._actors[shard].archive.remote(part, learned) for shard, part in parts))
        return [decode(one, WrittenFile) for one in answers]

    def drop(self, identities: Sequence[Identity], first_prompt: int) -> None:
        """Have trajectories forgotten that are gone; nobody waits for it, and what is missed goes by `first_prompt`."""
        by_shard = {shard: tuple(identities[row] for row in rows) for shard, rows in self._rows(identities)}
        for number, actor in enumerate(self._actors):
            actor.drop.remote(encode(by_shard.get(number, ())), first_prompt)

    async def phase_times(self) -> list[dict[str, PhaseTime]]:
        """The time that each of them has spent, by phase."""
        answers = await asyncio.gather(*(actor.report.remote() for actor in self._actors))
        return [decode(answer, dict[str, PhaseTime]) for answer in answers]

    def _rows(self, identities: Sequence[Identity]) -> list[tuple[int, list[int]]]:
        """The shards that have any of these, each with the places of its own."""
        found: dict[int, list[int]] = {}
        for row, identity in enumerate(identities):
            found.setdefault(identity.prompt % len(self._actors), []).append(row)
        return sorted(found.items())

    def _parts(self, batch: Batch) -> list[tuple[int, bytes]]:
        """The shards that have a part of a batch of records, each with its encoded `Part`."""
        records = batch.trajectories
        ends = np.cumsum([0, *(one.num_tokens for one in records)]).astype("<i8").tobytes()
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
            for shard, rows in self._rows([one.identity for one in records])
        ]
