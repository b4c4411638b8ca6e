"""`streamppo plan`: what a run will do before it is started, and which settings would make it faster.

On this machine the costs are those of `--measured` runs. For GPUs they are estimated from data sheets (roofline.py).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import msgspec

from streamppo import durable, process
from streamppo.commands.console import console, echo, table
from streamppo.commands.plan import measured, meshes, proposals, roofline
from streamppo.commands.plan.measured import MeasuredRun
from streamppo.commands.plan.proposals import Basis, Lengths, Proposal
from streamppo.commands.plan.roofline import GpuType
from streamppo.commands.plan.simulation import Prediction, skipped
from streamppo.commands.plan.workload import StageCosts
from streamppo.config import file as configfile
from streamppo.config.model import BUILTIN
from streamppo.config.sections import Config, longest_row
from streamppo.errors import ConfigError, RunError
from streamppo.learner import checkpointing, memory
from streamppo.queue.rules.state import queue_settings
from streamppo.telemetry import metrics_file
from streamppo.weights.models.settings import read_settings

GROUPS: Mapping[str, tuple[str, ...]] = {
    "an engine's step": ("step_s", "row_s", "cached_s"),
    "prefill": ("prefill_s", "prompt_s"),
    "an update": ("update_s", "token_s", "sync_s"),
    "a push and its swap": ("push_s", "swap_s"),
    "the queue": ("call_s", "stored_s", "publish_s"),
    "an actor's own work": ("sample_s",),
    "a reward": ("reward_s",),
}
"""Costs that are right or wrong together."""
DOUBT = {"measured": 0.15, "estimated": 0.5}
"""By how much a group of costs may be wrong."""
SPREAD, DRAWS = 0.8, 999
"""Assumed lengths on GPUs: the standard deviation of their logarithm, and how many are drawn."""
COMPARED = 60
"""Simulated updates beside those of a run."""
ROOM = 0.92
"""The share of a GPU's memory that may be planned."""
COLUMNS = ("predicted", "realised", "ratio")
WAITS = 0.1
"""A stage that waits for a smaller share of the time does not wait."""
GIB = 2**30


class Realised(NamedTuple):
    """What a run did after its first updates: updates and trained tokens per second, mean lag, the learner's waits."""

    updates_per_s: float
    tokens_per_s: float
    lag_mean: float
    learner_waits: float


class Comparison(NamedTuple):
    """What was predicted of a run, and what it did."""

    predicted: Prediction
    realised: Realised

    def rows(self) -> list[tuple[str, tuple[str, str, str]]]:
        """The numbers' names, each with the cells of `COLUMNS`."""
        found: list[tuple[str, tuple[str, str, str]]] = []
        for name, value in self.realised._asdict().items():
            expected: float = getattr(self.predicted, name)
            ratio = f"{expected / value:.2f}" if value else "-"
            shown = "{:.1%}" if name == "learner_waits" else "{:,.0f}" if name == "tokens_per_s" else "{:.3g}"
            cells = (shown.format(expected), shown.format(value), ratio)
            found.append((name.replace("_", " ").replace(" per s", "/s"), cells))
        return found


class Hardware(NamedTuple):
    """GPUs of a type, and the hours of one in money; None without a price."""

    gpus: int
    kind: str
    price: float | None


class Assumed(NamedTuple):
    """What no measured run says: mean tokens of prompt and completion, seconds of a reward."""

    prompt_tokens: float | None = None
    length: float | None = None
    reward_s: float | None = None


def basis(runs: Sequence[MeasuredRun], assumed: Assumed) -> Basis:
    """What `runs` on this machine say. Raises `ConfigError` for one on GPUs."""
    if any(one.config.learner.gpus or one.config.rollout.gpus for one in runs):
        raise ConfigError("plan --measured reads runs on CPUs: phases have CPU seconds, and no seconds of a GPU")
    costs = measured.costs(runs)
    if assumed.reward_s is not None:
        costs = costs._replace(reward_s=assumed.reward_s)
    found = [measured.lengths(one.folder) for one in runs]
    prompt_tokens = sum(prompt for prompt, _ in found) / len(found)
    lengths = Lengths(prompt_tokens, [length for _, drawn in found for length in drawn])
    cores = float(process.cores())
    return Basis(lengths, cores, lambda _: costs, lambda _: True, proposals.more_slots, DOUBT["measured"])


def on_this_machine(
    config: Config, folders: Sequence[Path], assumed: Assumed, run: Path | None, to: Path | None
) -> int:
    """Plan a run of `config` on this machine's cores; with a `run` of it, compare with what that run did.

    Raises `RunError` for a measured run that was too short.
    """
    if to is not None:
        durable.refuse_output(to, RunError)
    runs = [measured.read(folder) for folder in folders]
    known = basis(runs, assumed)
    if run is not None:
        return _show(beside(run, config, known), to)
    engines = [(f"rollout.actors={count}",) for count in range(1, 1 + max(process.cores(), config.rollout.actors))]
    echo(f"{process.cores()} cores, costs of {len(runs)} measured {'run' if len(runs) == 1 else 'runs'}", "")
    tried = proposals.improve(config, known, engines)
    _report(tried, known, to)
    if config.learner.ranks > 1 and not any(one.config.learner.ranks > 1 for one in runs):
        echo("no measured run has several ranks: what they wait for each other is not in these numbers")
    return 0


def on_gpus(config: Config, hardware: Hardware, assumed: Assumed, to: Path | None) -> int:
    """Plan a run of `config` on GPUs. Raises `ConfigError` for an unknown GPU and for a model that does not fit."""
    if to is not None:
        durable.refuse_output(to, RunError)
    if (gpu := roofline.GPUS.get(hardware.kind)) is None:
        raise ConfigError(f"{hardware.kind}: no known GPU; known are {', '.join(roofline.GPUS)}")
    if config.model.path == BUILTIN:
        raise ConfigError(f"plan --gpus needs the shapes of a model of yours: model.path is {BUILTIN}")
    settings = read_settings(config.model.path)
    model = memory.sizes(settings, config.model)
    length = assumed.length or config.rollout.max_tokens / 3
    prompt_tokens = assumed.prompt_tokens or (longest_row(config) - config.rollout.max_tokens) / 3
    lengths = Lengths(prompt_tokens, lognormal(length, config.rollout.max_tokens))

    def checkpointed(config: Config) -> Config:
        return checkpointing.resolved(config, model, longest_row(config), int(gpu.gib * GIB))

    def price(config: Config) -> StageCosts:
        mean = sum(lengths.completions) / len(lengths.completions)
        return roofline.costs(checkpointed(config), model, gpu, prompt_tokens, mean, assumed.reward_s or 0.0)

    def fits(config: Config) -> bool:
        engine = model.parameters * model.element / max(1.0, config.rollout.gpus)
        return max(memory.rank(checkpointed(config), model, longest_row(config)).total, engine) <= ROOM * gpu.gib * GIB

    def slots(config: Config) -> list[int]:
        """Return numbers of rows that an engine may decode together, as far as their cache has room."""
        gpus = max(1.0, config.rollout.gpus)
        room = (ROOM * gpu.gib * GIB * gpus - model.parameters * model.element) / model.cache_per_token
        mean = prompt_tokens + sum(lengths.completions) / len(lengths.completions)
        return [count for count in proposals.more_slots(config) if count * mean <= room]

    known = Basis(lengths, None, price, fits, slots, DOUBT["estimated"])
    divisions = [
        (split, mesh)
        for split in _splits(hardware.gpus, config.evaluation.actors, model, gpu)
        for mesh in meshes.choose(configfile.change(config, split), settings, fits)
    ]
    shows = any(mesh != config.learner.mesh for _, mesh in divisions)
    splits = [(*split, meshes.override(mesh)) if shows else split for split, mesh in divisions]
    if not splits:
        raise ConfigError(
            f"no division of {hardware.gpus} {hardware.kind} ({gpu.gib} GiB) holds ranks and engines of "
            f"{model.parameters:,} parameters: see `streamppo check`"
        )
    taken = config.learner.ranks * config.learner.gpus + config.engines * config.rollout.gpus
    begun = () if taken == hardware.gpus and fits(config) else splits[0]
    echo(
        f"{hardware.gpus} {hardware.kind}, {model.parameters:,} parameters; prompts of {prompt_tokens:,.0f} and "
        f"completions of {sum(lengths.completions) / DRAWS:,.0f} tokens on average, up to {max(lengths.completions):,}",
        "",
    )
    tried = proposals.improve(config, known, splits, begun)
    _report(tried, known, to)
    rate = tried[-1].prediction.updates_per_s
    hours = hardware.gpus * config.updates / rate / 3600
    cost = "" if hardware.price is None else f", {hours * hardware.price:,.0f} at {hardware.price:g} an hour"
    echo(f"{config.updates:,} updates take {config.updates / rate / 3600:,.1f} hours, {hours:,.0f} GPU hours{cost}")
    echo("estimated from data sheets: no run on several GPUs has been compared with it")
    return 0


def realised(run: Path) -> Realised:
    """What a run did after the updates that a prediction skips. Raises `ConfigError` if it made no more."""
    lines, skip = metrics_file.updates(run), skipped(queue_settings(configfile.load(run / configfile.CONFIG)))
    if len(lines) < skip + 2:
        raise ConfigError(f"{run}: {len(lines)} updates are too few to compare; the first {skip + 1} do not count")
    seconds = lines[-1]["wall_s"] - lines[skip]["wall_s"]
    rows = [metrics_file.numbers(line) for line in lines[skip + 1 :]]
    return Realised(
        updates_per_s=len(rows) / seconds,
        tokens_per_s=sum(row["tokens"] for row in rows) / seconds,
        lag_mean=sum(row["lag_mean"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows),
        learner_waits=sum(row["wait_s"] for row in rows) / seconds,
    )


def lognormal(mean: float, most: int) -> list[int]:
    """Lengths at evenly spaced shares of a lognormal distribution, in an arbitrary order that is always the same."""
    median = mean / math.exp(SPREAD**2 / 2)
    drawn = [median * math.exp(SPREAD * NormalDist().inv_cdf((place + 0.5) / DRAWS)) for place in range(DRAWS)]
    # 617 and 999 have no common factor: every place comes once.
    return [max(1, min(most, round(drawn[617 * place % DRAWS]))) for place in range(DRAWS)]


def _splits(gpus: int, evaluators: int, model: memory.ModelSizes, gpu: GpuType) -> list[tuple[str, ...]]:
    """Every division of `gpus` into ranks and engines, beside `evaluators` that only evaluate.

    An engine has the fewest GPUs that hold its weights twice: the rest of their memory is its cache.
    """
    weights = model.parameters * model.element
    wide = next((width for width in (1, 2, 4, 8) if 2 * weights / width <= ROOM * gpu.gib * GIB), 8)
    gpus -= wide * evaluators
    counts = [ranks for ranks in range(1, gpus) if (gpus - ranks) % wide == 0 and _is_round(ranks)]
    return [
        (
            "learner.gpus=1",
            f"learner.ranks={ranks}",
            f"rollout.gpus={wide}",
            f"rollout.actors={(gpus - ranks) // wide}",
        )
        for ranks in counts
    ]


def _is_round(ranks: int) -> bool:
    """True for a number of ranks that fills nodes, or divides one."""
    return ranks % roofline.NODE == 0 or roofline.NODE % ranks == 0


def _report(tried: Sequence[Proposal], known: Basis, to: Path | None) -> None:
    """Print the proposals, the best last, and the cost that the best depends on most."""
    shown = table("settings", "updates/s", "tokens/s", "learner waits", "engines busy", "lag", "p99", "max", "lost")
    for one in tried:
        shown.add_row(" ".join(one.overrides) or "as configured", *_cells(one.prediction))
    console().print(shown)
    best = tried[-1]
    group, low, high = least_sure(best, known)
    echo(
        "",
        f"who waits: {_who_waits(best.prediction)}",
        f"least sure of {group}: {known.doubt:.0%} more or less of it are {low:+.0%} to {high:+.0%} updates/s",
    )
    before, after = tried[0].config.queue, best.config.queue
    counted = "tokens are counted, not what they teach: with a larger"
    if after.bound > before.bound:
        echo(f"{counted} max_lag an update teaches less (docs/off-policy.md)")
    if after.batch_size > before.batch_size:
        echo(f"{counted} batch_size the same tokens make fewer updates")
    if to:
        costs = known.price(best.config)._asdict()
        _write(to, {"proposals": [_stored(one) for one in tried], "costs": costs})


def least_sure(proposal: Proposal, known: Basis) -> tuple[str, float, float]:
    """(the group of costs on which updates/s depend most, their change with more of it, and with less)."""
    costs, base = known.price(proposal.config), proposal.prediction.updates_per_s

    def change(group: str, factor: float) -> float:
        other = _scaled(costs, GROUPS[group], factor)
        return proposals.predict(proposal.config, known, costs=other).updates_per_s / base - 1

    more = {group: change(group, 1 + known.doubt) for group in GROUPS}
    group = max(more, key=lambda name: abs(more[name]))
    return group, more[group], change(group, 1 / (1 + known.doubt))


def _scaled(costs: StageCosts, names: Sequence[str], factor: float) -> StageCosts:
    return costs._replace(**{name: getattr(costs, name) * factor for name in names})


def beside(run: Path, config: Config, known: Basis) -> Comparison:
    """What was to be expected of a run of `config`, beside what `run` did. Raises `ConfigError`."""
    return Comparison(proposals.predict(config, known, COMPARED), realised(run))


def compare(runs: Sequence[Path], folders: Sequence[Path]) -> list[Comparison]:
    """Each run beside what the costs of the runs in `folders` predict for it. Raises `StreamppoError`."""
    known = basis([measured.read(folder) for folder in folders], Assumed())
    return [beside(run, configfile.load(configfile.existing(run) / configfile.CONFIG), known) for run in runs]


def _show(found: Comparison, to: Path | None) -> int:
    shown = table("", *COLUMNS)
    for name, cells in found.rows():
        shown.add_row(name, *cells)
    console().print(shown)
    if to:
        _write(to, {"predicted": _numbers(found.predicted), "realised": found.realised._asdict()})
    return 0


def _write(to: Path, content: object) -> None:
    durable.write_output(to, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n", RunError)


def _cells(found: Prediction) -> list[str]:
    numbers = [f"{found.updates_per_s:.3g}", f"{found.tokens_per_s:,.0f}", f"{found.learner_waits:.0%}"]
    numbers += [f"{found.engines_busy:.0%}", f"{found.lag_mean:.2f}"]
    return [*numbers, str(found.lag_quantile(0.99)), str(max(found.lags)), f"{found.tokens_lost:.1%}"]


def _who_waits(found: Prediction) -> str:
    """The stage that waits most, in words."""
    learner, engines = found.learner_waits, 1 - found.engines_busy
    if max(learner, engines) < WAITS:
        return "nobody for more than a tenth of the time"
    if learner >= engines:
        return f"the learner, {learner:.0%} of the time: more engines or trajectories in flight help"
    return f"engines, {engines:.0%} of the time: more ranks or fewer engines help"


def _stored(one: Proposal) -> dict[str, object]:
    return {"overrides": one.overrides, **_numbers(one.prediction)}


def _numbers(found: Prediction) -> dict[str, object]:
    lags = {"lag_mean": found.lag_mean, "lag_p50": found.lag_quantile(0.5), "lag_p99": found.lag_quantile(0.99)}
    rates = {name: value for name, value in found._asdict().items() if name != "lags"}
    return {**rates, **lags, "lag_max": max(found.lags)}
