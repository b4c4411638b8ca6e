"""The settings of a configuration that decide its throughput, and better ones, found by simulating them.

One setting after another takes the value with the most trained tokens per second; within `EQUAL` of it the first,
which is the one that asks for less: fewer GPUs of a stage, a smaller lag, fewer rows and trajectories in flight. A
larger batch must gain `BATCH_GAIN`, because it changes what an update learns.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from streamppo.commands.plan.simulation import Prediction, simulate
from streamppo.commands.plan.workload import StageCosts, Workload
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import ConfigError
from streamppo.queue.rules.state import queue_settings

EQUAL = 0.02
"""Rates that differ by less are equal: a smaller lag or demand decides."""
LAGS = (1, 2, 4, 8, 16)
MORE_SLOTS, MORE_ROWS = (0.5, 2, 4, 8), (2, 4)
"""Tried rows of an engine and trajectories of a batch, by the configured number."""
BATCH_GAIN = 0.1
MORE_IN_FLIGHT = (1.0, 1.5, 2.0, 4.0)
"""Trajectories in flight for each slot of an engine: those beyond 1 wait for a row or for their reward."""
TRAJECTORIES, FEWEST, MOST = 8_192, 10, 30
"""Simulated trajectories of a proposal, in so many updates at least and at most."""
MOST_S = 4 * 3600.0
"""Simulated seconds after which a proposal is judged by the updates so far."""


class Lengths(NamedTuple):
    """Mean tokens of a prompt, and drawn tokens of completions."""

    prompt_tokens: float
    completions: Sequence[int]


class Proposal(NamedTuple):
    """Overrides of the configuration, and what is predicted with them."""

    overrides: tuple[str, ...]
    config: Config
    prediction: Prediction


class Basis(NamedTuple):
    """What predictions rest on: lengths, shared cores (None: stages have GPUs), and costs with a configuration.

    A configuration that does not fit the hardware is not proposed, and only `slots` for which an engine has memory.
    Costs may be wrong by the share `doubt`.
    """

    lengths: Lengths
    cores: float | None
    price: Callable[[Config], StageCosts]
    fits: Callable[[Config], bool]
    slots: Callable[[Config], Sequence[int]]
    doubt: float


def workload(config: Config, basis: Basis) -> Workload:
    """What a run of `config` has to do. Raises `ConfigError` for what is not simulated."""
    if config.queue.segments is not None or config.environment is not None:
        what = "queue.segments" if config.queue.segments is not None else "an environment"
        raise ConfigError(f"plan simulates whole completions of one turn, and this configuration has {what}")
    return Workload(
        # A simulation has no rows: no prompt is skipped.
        queue_settings(config)._replace(curriculum=None),
        actors=config.rollout.actors,
        in_flight=config.rollout.in_flight,
        slots=config.rollout.slots,
        ranks=config.learner.ranks,
        prompt_tokens=basis.lengths.prompt_tokens,
        lengths=[min(length, config.rollout.max_tokens) for length in basis.lengths.completions],
        evaluation_every=0 if config.evaluation.actors else config.evaluation.every,
        evaluation_prompts=config.evaluation.prompts,
        cores=basis.cores,
        threads=config.learner.thread_count,
    )


def predict(config: Config, basis: Basis, updates: int = 0, costs: StageCosts | None = None) -> Prediction:
    """Simulate a run of `config`: some updates, or as many as suffice to compare proposals; with other `costs`."""
    some = updates or max(FEWEST, min(MOST, TRAJECTORIES // config.queue.batch_size))
    return simulate(workload(config, basis), costs or basis.price(config), some, MOST_S)


def more_slots(config: Config) -> list[int]:
    """The numbers of rows to try in an engine, in ascending order; as many completions wait for one as before."""
    return [max(1, round(config.rollout.slots * share)) for share in MORE_SLOTS]


def improve(
    config: Config, basis: Basis, splits: Sequence[tuple[str, ...]], first: tuple[str, ...] = ()
) -> list[Proposal]:
    """Proposals, the best last: `config` with the overrides `first`, then each with one more setting changed.

    `splits` are overrides that divide cores or GPUs between ranks and engines.
    """
    config = configfile.change(config, first)
    found = [Proposal(first, config, predict(config, basis))]
    rows: list[tuple[Callable[[Config], Sequence[tuple[str, ...]]], float]] = [
        (partial(_slots, basis), EQUAL),
        (_in_flight, EQUAL),
    ]
    steps = [
        (lambda _: splits, EQUAL),
        (lambda _: [(f"queue.max_lag={lag}",) for lag in LAGS], EQUAL),
        *rows,
        (lambda best: [(f"queue.batch_size={best.queue.batch_size * more}",) for more in MORE_ROWS], BATCH_GAIN),
        # A larger batch admits more trajectories.
        *rows,
    ]
    for choices, gain in steps:
        best = found[-1]
        tried = [one for overrides in choices(best.config) if (one := _changed(best, overrides, basis))]
        most = max((one.prediction.tokens_per_s for one in tried), default=0.0)
        if most > best.prediction.tokens_per_s * (1 + gain):
            found.append(next(one for one in tried if one.prediction.tokens_per_s * (1 + EQUAL) >= most))
    return found


def _slots(basis: Basis, best: Config) -> list[tuple[str, ...]]:
    waiting = best.rollout.in_flight / best.rollout.slots
    return [(f"rollout.slots={count}", f"rollout.in_flight={round(count * waiting)}") for count in basis.slots(best)]


def _in_flight(best: Config) -> list[tuple[str, ...]]:
    return [(f"rollout.in_flight={round(best.rollout.slots * share)}",) for share in MORE_IN_FLIGHT]


def _changed(base: Proposal, overrides: tuple[str, ...], basis: Basis) -> Proposal | None:
    """`base` with further overrides; None where the configuration would be refused or does not fit."""
    try:
        config = configfile.change(base.config, overrides)
    except ConfigError:
        return None
    if not basis.fits(config):
        return None
    names = [one.partition("=")[0] for one in overrides]
    kept = (one for one in base.overrides if one.partition("=")[0] not in names)
    return Proposal((*kept, *overrides), config, predict(config, basis))
