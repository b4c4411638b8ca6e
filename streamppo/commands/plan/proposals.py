"""Proposes meshes that hold a model, and settings with a higher throughput, which it finds by simulation.

Settings are changed one after another, each to the value with the most trained tokens per second. Of several values
within `EQUAL` of the highest rate, the first is taken: the fewest GPUs of a stage, the smallest lag, the fewest slots
and trajectories in flight. A larger batch must raise the rate by the share `BATCH_GAIN`, because it changes learning.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from streamppo.commands.plan.roofline import NODE
from streamppo.commands.plan.simulation import Prediction, simulate
from streamppo.commands.plan.workload import StageCosts, Workload
from streamppo.config import file as configfile
from streamppo.config.learner import Mesh
from streamppo.config.sections import Config
from streamppo.errors import ConfigError
from streamppo.learner.parallel import context_parallel, tensor_parallel
from streamppo.queue.rules.state import queue_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PARTS = (2, 4, 8)
"""Tried numbers of ranks that share rows, layers or experts."""
EQUAL = 0.02
"""Rates with a smaller relative difference count as equal."""
LAGS = (1, 2, 4, 8, 16)
MORE_SLOTS, MORE_ROWS = (0.5, 2, 4, 8), (2, 4)
"""Tried slots of an engine, and trajectories of a batch, as multiples of the configured numbers."""
BATCH_GAIN = 0.1
MORE_IN_FLIGHT = (1.0, 1.5, 2.0, 4.0)
"""Tried trajectories in flight, as multiples of an engine's slots. Some trajectories wait for a slot or a reward."""
TRAJECTORIES, FEWEST, MOST = 8_192, 10, 30
"""Number of simulated trajectories of a proposal, and the bounds on its updates."""
MOST_S = 4 * 3600.0


class Lengths(NamedTuple):
    """Mean tokens of a prompt, and tokens of sampled completions."""

    prompt_tokens: float
    completions: Sequence[int]


class Proposal(NamedTuple):
    """Overrides, the configuration with them, and its prediction."""

    overrides: tuple[str, ...]
    config: Config
    prediction: Prediction


class Basis(NamedTuple):
    """The data for predictions: lengths, the shared `cores` (None if stages have GPUs), and `price`, the stages' costs.

    `fits` returns True if the hardware can hold a configuration, and `slots` the numbers of slots to try. Costs may be
    wrong by the share `doubt`.
    """

    lengths: Lengths
    cores: float | None
    price: Callable[[Config], StageCosts]
    fits: Callable[[Config], bool]
    slots: Callable[[Config], Sequence[int]]
    doubt: float


def workload(config: Config, basis: Basis) -> Workload:
    """Return the workload of a run of `config`. Raises `ConfigError` for settings that are not simulated."""
    if config.queue.segments is not None or config.environment is not None:
        setting = "queue.segments" if config.queue.segments is not None else "an environment"
        raise ConfigError(f"plan simulates whole completions of one turn, and this configuration has {setting}")
    return Workload(
        # A simulation has no rows of data, so no prompt is skipped.
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
    """Simulate `updates` updates of `config` (0: enough to compare proposals). `costs` replace the costs of `basis`."""
    count = updates or max(FEWEST, min(MOST, TRAJECTORIES // config.queue.batch_size))
    return simulate(workload(config, basis), costs or basis.price(config), count, MOST_S)


def more_slots(config: Config) -> list[int]:
    """Return the numbers of an engine's slots to try, in ascending order."""
    return [max(1, round(config.rollout.slots * share)) for share in MORE_SLOTS]


def improve(
    config: Config, basis: Basis, splits: Sequence[tuple[str, ...]], first: tuple[str, ...] = ()
) -> list[Proposal]:
    """Return proposals with the best last. The first has the overrides `first`; each of the others adds a change.

    `splits` are overrides that divide cores or GPUs between ranks and engines.
    """
    config = configfile.change(config, first)
    proposals = [Proposal(first, config, predict(config, basis))]
    rows: list[tuple[Callable[[Config], Sequence[tuple[str, ...]]], float]] = [(partial(_slots, basis), EQUAL)]
    rows.append((_in_flight, EQUAL))
    steps = [
        (lambda _: splits, EQUAL),
        (lambda _: [(f"queue.max_lag={lag}",) for lag in LAGS], EQUAL),
        *rows,
        (lambda best: [(f"queue.batch_size={best.queue.batch_size * more}",) for more in MORE_ROWS], BATCH_GAIN),
        # Slots are tried again, because a larger batch admits more trajectories.
        *rows,
    ]
    for choices, gain in steps:
        best = proposals[-1]
        tried = [trial for overrides in choices(best.config) if (trial := _changed(best, overrides, basis))]
        most = max((trial.prediction.tokens_per_s for trial in tried), default=0.0)
        if most > best.prediction.tokens_per_s * (1 + gain):
            proposals.append(next(trial for trial in tried if trial.prediction.tokens_per_s * (1 + EQUAL) >= most))
    return proposals


def _slots(basis: Basis, best: Config) -> list[tuple[str, ...]]:
    waiting = best.rollout.in_flight / best.rollout.slots
    return [(f"rollout.slots={count}", f"rollout.in_flight={round(count * waiting)}") for count in basis.slots(best)]


def _in_flight(best: Config) -> list[tuple[str, ...]]:
    return [(f"rollout.in_flight={round(best.rollout.slots * share)}",) for share in MORE_IN_FLIGHT]


def _changed(base: Proposal, overrides: tuple[str, ...], basis: Basis) -> Proposal | None:
    try:
        config = configfile.change(base.config, overrides)
    except ConfigError:
        return None
    if not basis.fits(config):
        return None
    names = [override.partition("=")[0] for override in overrides]
    others = (override for override in base.overrides if override.partition("=")[0] not in names)
    return Proposal((*others, *overrides), config, predict(config, basis))


def choose_meshes(config: Config, model: "PretrainedConfig", fits: Callable[[Config], bool]) -> list[Mesh]:
    """Return meshes for the ranks of `config` that `model` supports and for which `fits` returns True.

    The candidates are the configured mesh, and the same mesh with a replica on each node. If neither fits, meshes that
    divide experts, then rows, then layers are tried, and the result is the first mesh that fits.
    """
    plain = [mesh for mesh in _plain(config) if _holds(config, mesh, model, fits)]
    candidates = product(("expert", "context", "tensor"), PARTS)
    meshes = (structs.replace(config.learner.mesh, **{field: parts}) for field, parts in candidates)
    return plain or list(islice((mesh for mesh in meshes if _holds(config, mesh, model, fits)), 1))


def mesh_override(mesh: Mesh) -> str:
    """Return the override that sets `mesh`."""
    parts = [f"{name}={ranks}" for name, ranks in structs.asdict(mesh).items() if ranks > 1]
    return f"learner.mesh={{{', '.join(parts)}}}"


def _plain(config: Config) -> Iterator[Mesh]:
    yield config.learner.mesh
    ranks = config.learner.ranks
    if ranks > NODE and ranks % NODE == 0:
        yield structs.replace(config.learner.mesh, replicate=ranks // NODE)


def _holds(config: Config, mesh: Mesh, model: "PretrainedConfig", fits: Callable[[Config], bool]) -> bool:
    if context_parallel.refusal(model, mesh.slices) or tensor_parallel.refusal(model, mesh.expert):
        return False
    try:
        return fits(configfile.change(config, [mesh_override(mesh)]))
    except ConfigError:
        return False
