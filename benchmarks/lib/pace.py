"""One update of a world as a rank makes it, and who chooses how old its data may be. For lags.py and simulated.py."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from benchmarks.lib.world import World
from streamppo.algorithms.lag import AdmittedLag, lr_share
from streamppo.config.sections import Config
from streamppo.learner.batch.fetch import lag_histogram
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.model import optimizer
from streamppo.learner.objective import adaptive_lag
from streamppo.learner.update import UpdateResult


class Pace(Protocol):
    """Who chooses the lag, and the policy's learning rate."""

    @property
    def admitted(self) -> int:
        """How many versions old a batch may be."""
        ...

    def before(self, batch: PaddedBatch) -> float:
        """Return the share of the learning rate for the update on a batch."""
        ...

    def after(self, batch: PaddedBatch, metrics: Mapping[str, float]) -> None:
        """Learn from the update on a batch, which has been described in `metrics`."""
        ...


class Fixed:
    """A lag that stays as it is."""

    def __init__(self, lag: int) -> None:
        self.admitted = lag

    def before(self, batch: PaddedBatch) -> float:
        """Leave the learning rate."""
        return 1.0

    def after(self, batch: PaddedBatch, metrics: Mapping[str, float]) -> None:
        """Learn nothing."""


class Adaptive:
    """The rule of `queue.max_lag = adaptive`, as the learner has it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lag = adaptive_lag.go_on(config, None) or AdmittedLag(0)

    @property
    def admitted(self) -> int:
        """The lag that the last decision admits."""
        return self._lag.admitted

    def before(self, batch: PaddedBatch) -> float:
        """Leave what the rule leaves."""
        return lr_share(self._lag, lag_histogram(batch))

    def after(self, batch: PaddedBatch, metrics: Mapping[str, float]) -> None:
        """Decide."""
        self._lag = adaptive_lag.lag_after_update(self._config, self._lag, batch.version, metrics, lag_histogram(batch))


class Step(NamedTuple):
    """What came of one update; `scheduled` is the policy's learning rate before anything lowered it."""

    updated: UpdateResult
    metrics: dict[str, float]
    scheduled: float


def step(world: World, pace: Pace, batch: PaddedBatch) -> Step:
    """Train on a batch."""
    adamw = world.updater.optimizer
    optimizer.follow_schedule(adamw, world.config, batch.version)
    scheduled = adamw.param_groups[0]["lr"]
    optimizer.lower_policy(adamw, pace.before(batch))
    updated = world.updater.update(batch.to(world.updater.device))
    metrics = world.updater.metrics(updated)
    pace.after(batch, metrics)
    return Step(updated, metrics, scheduled)
