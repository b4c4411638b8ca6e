"""Queue shards without Ray: their calls are coroutines of this process."""

import asyncio
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from streamppo.config.sections import Config
from streamppo.queue.shards.batch_refs import Put
from streamppo.queue.shards.shard import QueueShard
from streamppo.queue.shards.shards import Shards, numbers
from streamppo.types import TokenRecord, Trajectory, encode


class Handle:
    """Replaces the actor handle of `shard`."""

    def __init__(self, shard: QueueShard) -> None:
        self.shard = shard

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: asyncio.ensure_future(getattr(self.shard, name)(*given)))


class Ref:
    """Replaces an object reference; it can be awaited repeatedly."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, bytes]:
        yield
        return self._value


class Never:
    """Replaces an object reference on an unreachable node: awaiting it never returns."""

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.Event().wait().__await__()


def shards(config: bytes, run: Path, put: Put) -> Shards:
    """The shards of the run in the folder `run`, which must have the model's config.json."""
    made = numbers(msgspec.msgpack.decode(config, type=Config))
    actors: Any = [Handle(QueueShard(config, str(run), str(run), number, put)) for number in made]
    return Shards(actors)


async def deliver(queue: Any, actor: str, made: Sequence[Trajectory]) -> None:
    """Deliver trajectories like a rollout actor."""
    await queue.deliver(actor, 0, await given(queue, made), encode(()))


async def given(queue: Any, made: Sequence[Trajectory]) -> bytes:
    """Encode the trajectories for `queue`; if it has shards, store them there first."""
    return encode(await queue._shards.store(made) if queue._shards else tuple(made))


def told(queue: Any, learned: TokenRecord) -> Any:
    """The learner's token record in the form in which a rank passes it to `queue`."""
    return [Ref(encode(learned))] if queue._shards else encode(learned)
