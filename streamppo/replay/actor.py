"""The Ray actor around the queue and the ledger: a mailbox, one event loop, no rules of its own.

    consumes     trajectories and failures from rollout actors, versions from the learner
    produces     tickets, batches, weights
    waits for    nothing; its callers wait here, on one condition that every change notifies

Queue and ledger share a process, so that a version becomes known, ends the lease of the batch that made it and lets
engines pull it in one step.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from streamppo.config import Config
from streamppo.config_algorithm import GROUP_BASED
from streamppo.replay.queue import ReplayQueue
from streamppo.types import Failure, Push, Trajectory, decode, encode
from streamppo.weights.ledger import Ledger

POLL_S = 5.0
"""A long poll comes back empty after this, so that a caller that has died does not wait here for ever."""
T = TypeVar("T")


class ReplayActor:
    """Every method is safe to call twice with the same arguments."""

    def __init__(self, config: bytes, version: int) -> None:
        self.config = msgspec.msgpack.decode(config, type=Config)
        queue = self.config.queue
        self._queue = ReplayQueue(
            task=self.config.task.__struct_config__.tag,  # pyright: ignore[reportArgumentType]
            batch_size=queue.batch_size,
            samples_per_prompt=queue.samples_per_prompt,
            max_lag=queue.max_lag,
            whole_groups=isinstance(self.config.algorithm.advantage, GROUP_BASED),
            resample_equal=self.config.algorithm.zero_variance == "resample",
            too_old=queue.too_old,
            max_attempts=queue.max_attempts,
            max_failure_rate=queue.max_failure_rate,
            version=version,
        )
        self._ledger = Ledger()
        self._changed = asyncio.Condition()
        self._engine_versions: dict[str, int] = {}

    async def issue(self, actor: str, engine_version: int, limit: int) -> bytes:
        """Up to `limit` tickets, as soon as there is one; none after `POLL_S`.

        A swap may happen while the call waits here: `swapped` says so, and admits more.
        """
        self._engine_versions[actor] = engine_version
        tickets = await self._poll(lambda: self._queue.issue(actor, self._engine_versions[actor], limit) or None)
        return encode(tickets or ())

    async def swapped(self, actor: str, engine_version: int) -> None:
        """The engine of `actor` holds `engine_version` from here on."""
        self._engine_versions[actor] = engine_version
        await self._notify()

    async def deliver(self, trajectories: bytes, failures: bytes) -> None:
        """What a rollout actor has finished since it last called."""
        for trajectory in decode(trajectories, tuple[Trajectory, ...]):
            self._queue.put(trajectory)
        for failure in decode(failures, tuple[Failure, ...]):
            self._queue.fail(failure)
        await self._notify()

    async def take(self, version: int) -> bytes:
        """The batch of the update that starts at `version`, as soon as it is whole."""
        async with self._changed:
            await self._changed.wait_for(lambda: version <= self._queue.version + 1)
            while (batch := self._queue.take(version)) is None:
                await self._changed.wait()
        await self._notify()
        return encode(batch)

    async def publish(self, push: bytes, refs: list[Any]) -> None:
        """A new version: its batch is consumed, its weights can be pulled, its admission slots are free."""
        described = decode(push, Push)
        self._ledger.publish(described, (push, refs))
        self._queue.publish(described.version)
        await self._notify()

    async def weights_after(self, version: int) -> tuple[bytes, list[Any]] | None:
        """The newest push above `version`, as soon as there is one; None after `POLL_S`."""
        found = await self._poll(lambda: self._ledger.after(version))
        return found[1] if found else None

    async def lost(self, actor: str) -> None:
        """What `actor` was sampling is sampled again by others."""
        self._queue.lost(actor)
        await self._notify()

    async def report(self) -> bytes:
        """The queue's counters."""
        return encode(self._queue.report())

    async def waiting_for(self) -> str:
        """One sentence for the watchdog."""
        return self._queue.waiting_for()

    async def _poll(self, ask: Callable[[], T | None]) -> T | None:
        try:
            async with asyncio.timeout(POLL_S), self._changed:
                while (found := ask()) is None:
                    await self._changed.wait()
                return found
        except TimeoutError:
            return None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
