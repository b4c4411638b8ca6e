"""The batches and updates of a world, as a queue and a rank make them, and the policy for the age of the data."""

from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from benchmarks.lib.world import World, next_batch
from streamppo.algorithms.lag import AdmittedLag, lr_share
from streamppo.config.sections import Config
from streamppo.learner.batch.fetch import lag_histogram
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import optimizer
from streamppo.learner.objective import adaptation
from streamppo.learner.update import UpdateResult
from streamppo.learner.update_metrics import update_metrics
from streamppo.types import Batch


class Pace(Protocol):
    """Chooses the lag and the share of the policy's learning rate."""

    @property
    def admitted(self) -> int:
        """The largest age of a batch, in versions."""
        ...

    def before(self, batch: PaddedBatch) -> float:
        """Return the share of the learning rate for the update on a batch."""
        ...

    def after(self, batch: PaddedBatch, metrics: Mapping[str, float]) -> None:
        """Adapt to the `metrics` of the update on a batch."""
        ...


class Fixed:
    """A constant lag and learning rate."""

    def __init__(self, lag: int) -> None:
        self.admitted = lag

    def before(self, batch: PaddedBatch) -> float:
        """Return 1: the whole learning rate."""
        return 1.0

    def after(self, batch: PaddedBatch, metrics: Mapping[str, float]) -> None:
        """Do nothing."""


class Adaptive:
    """The learner's rule for an adaptive `queue.max_lag`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lag = adaptation.lag_under(config, None) or AdmittedLag(0)

    @property
    def admitted(self) -> int:
        """The lag admitted by the last decision."""
        return self._lag.admitted

    def before(self, batch: PaddedBatch) -> float:
        """Return the rule's share of the learning rate."""
        return lr_share(self._lag, lag_histogram(batch))

    def after(self, batch: PaddedBatch, metrics: Mapping[str, float]) -> None:
        """Decide the next lag by the rule; the studies have no `queue.segments` for which the policy waits."""
        lags, frozen = lag_histogram(batch), batch.version < self._config.algorithm.critic.warmup_updates
        if not frozen:
            self._lag = adaptation.lag_after_update(self._config, self._lag, metrics, lags)


class Step(NamedTuple):
    """The result of one update; `scheduled` is the policy's learning rate before `Pace.before` lowered it."""

    updated: UpdateResult
    metrics: dict[str, float]
    scheduled: float


async def batches(world: World, pace: Pace) -> AsyncIterator[PaddedBatch]:
    """Yield the batch of each update, with as many batches sampled ahead as `pace` admits.

    The engine's weights are those that the caller has swapped in: version u before the batch of update u is taken.
    """
    ahead, number = deque[Batch](), 0
    for version in range(world.config.updates):
        while len(ahead) <= pace.admitted:
            rows = await next_batch(world, number, version)
            ahead.append(Batch(version=version, min_version=0, trajectories=tuple(rows)))
            number += 1
        yield pad(replace(ahead.popleft(), version=version))


def step(world: World, pace: Pace, batch: PaddedBatch) -> Step:
    """Make one update on a batch."""
    adamw = world.updater.optimizer
    optimizer.follow_schedule(adamw, world.config, batch.version)
    scheduled = adamw.param_groups[0]["lr"]
    optimizer.lower_policy(adamw, pace.before(batch))
    updated = world.updater.update(batch.to(world.updater.device))
    metrics = update_metrics(world.updater, updated)
    world.updater.adapt(updated, metrics)
    pace.after(batch, metrics)
    return Step(updated, metrics, scheduled)
