"""`streamppo plan`: predicts the throughput of a run by measured runs or, for GPUs, data sheets; proposes settings."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import msgspec

from streamppo import durable
from streamppo.commands.console import console, echo, table
from streamppo.commands.plan import measured, proposals, roofline
from streamppo.commands.plan.measured import MeasuredRun
from streamppo.commands.plan.proposals import Basis, Lengths, Proposal
from streamppo.commands.plan.roofline import GpuType
from streamppo.commands.plan.simulation import Prediction, skipped
from streamppo.commands.plan.workload import StageCosts
from streamppo.config import file as configfile
from streamppo.config.model import BUILTIN
from streamppo.config.sections import Config, longest_row
from streamppo.errors import ConfigError, RunError
from streamppo.learner import gradient_checkpointing, memory
from streamppo.queue.rules.state import queue_settings
from streamppo.telemetry import host, metrics_file
from streamppo.telemetry.metrics_file import UpdateLine
from streamppo.terminal import counted
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
"""Groups of costs whose relative errors are probably equal."""
DOUBT = {"measured": 0.15, "estimated": 0.5}
"""Assumed relative error of a group of costs."""
SPREAD, DRAWS = 0.8, 999
"""The standard deviation of the logarithm of assumed completion lengths, and the number of these lengths."""
COMPARED = 60
ROOM = 0.92
COLUMNS = ("predicted", "realised", "ratio")
WAITS = 0.1
GIB = 2**30


class Realised(NamedTuple):
    """Measured numbers of a run after its first updates. `learner_waits` is a share of the time."""

    updates_per_s: float
    tokens_per_s: float
    lag_mean: float
    learner_waits: float


class Comparison(NamedTuple):
    """The prediction and the measured numbers of a run."""

    predicted: Prediction
    realised: Realised

    def rows(self) -> list[tuple[str, tuple[str, str, str]]]:
        rows: list[tuple[str, tuple[str, str, str]]] = []
        for name, value in self.realised._asdict().items():
            expected: float = getattr(self.predicted, name)
            ratio = f"{expected / value:.2f}" if value else "-"
            number = "{:.1%}" if name == "learner_waits" else "{:,.0f}" if name == "tokens_per_s" else "{:.3g}"
            cells = (number.format(expected), number.format(value), ratio)
            rows.append((name.replace("_", " ").replace(" per s", "/s"), cells))
        return rows


class Hardware(NamedTuple):
    """Number and type of GPUs, and the price of a GPU hour if given."""

    gpus: int
    kind: str
    price: float | None


class Assumed(NamedTuple):
    """Assumptions of the user: mean tokens of prompt and completion, and seconds of a reward."""

    prompt_tokens: float | None = None
    length: float | None = None
    reward_s: float | None = None


def basis(runs: Sequence[MeasuredRun], assumed: Assumed) -> Basis:
    """Return the basis of predictions from `runs` on this machine. Raises `ConfigError` for runs on GPUs."""
    if any(run.config.learner.gpus or run.config.rollout.gpus for run in runs):
        raise ConfigError("plan --measured reads runs on CPUs: phases have CPU seconds, and no seconds of a GPU")
    costs = measured.costs(runs)
    if assumed.reward_s is not None:
        costs = costs._replace(reward_s=assumed.reward_s)
    run_lengths = [measured.lengths(run.folder) for run in runs]
    prompt_tokens = sum(prompt for prompt, _ in run_lengths) / len(run_lengths)
    lengths = Lengths(prompt_tokens, [length for _, completions in run_lengths for length in completions])
    cores = float(host.cores())
    return Basis(lengths, cores, lambda _: costs, lambda _: True, proposals.more_slots, DOUBT["measured"])


def on_this_machine(
    config: Config, folders: Sequence[Path], assumed: Assumed, run: Path | None, to: Path | None
) -> int:
    """Plan a run on this machine, or compare `run` with its prediction. Raises `RunError` for too short a run."""
    if to is not None:
        durable.refuse_output(to, RunError)
    runs = [measured.read(folder) for folder in folders]
    known = basis(runs, assumed)
    if run is not None:
        return _print_comparison(compare_run(run, config, known), to)
    engines = [(f"rollout.actors={count}",) for count in range(1, 1 + max(host.cores(), config.rollout.actors))]
    echo(f"{host.cores()} cores, costs of {counted(len(runs), 'measured run')}", "")
    tried = proposals.improve(config, known, engines)
    _report(tried, known, to)
    if config.learner.ranks > 1 and not any(run.config.learner.ranks > 1 for run in runs):
        echo("no measured run has several ranks: their waits for each other are not in these numbers")
    return 0


def on_gpus(config: Config, hardware: Hardware, assumed: Assumed, to: Path | None) -> int:
    """Plan a run of `config` on GPUs. Raises `ConfigError` if the GPU is unknown or the model does not fit."""
    if to is not None:
        durable.refuse_output(to, RunError)
    if (gpu := roofline.GPUS.get(hardware.kind)) is None:
        raise ConfigError(f"{hardware.kind}: no known GPU; known are {', '.join(roofline.GPUS)}")
    if config.model.path == BUILTIN:
        raise ConfigError(f"plan --gpus needs a model of yours: model.path is {BUILTIN}")
    settings = read_settings(config.model.path)
    model = memory.sizes(settings, config.model)
    length = assumed.length or config.rollout.max_tokens / 3
    prompt_tokens = assumed.prompt_tokens or (longest_row(config) - config.rollout.max_tokens) / 3
    lengths = Lengths(prompt_tokens, lognormal(length, config.rollout.max_tokens))

    def checkpointed(config: Config) -> Config:
        return gradient_checkpointing.resolve(config, model, longest_row(config), int(gpu.gib * GIB))

    def price(config: Config) -> StageCosts:
        mean = sum(lengths.completions) / len(lengths.completions)
        return roofline.costs(checkpointed(config), model, gpu, prompt_tokens, mean, assumed.reward_s or 0.0)

    def fits(config: Config) -> bool:
        engine = model.parameters * model.element / max(1.0, config.rollout.gpus)
        return max(memory.rank(checkpointed(config), model, longest_row(config)).total, engine) <= ROOM * gpu.gib * GIB

    def slots(config: Config) -> list[int]:
        gpus = max(1.0, config.rollout.gpus)
        room = (ROOM * gpu.gib * GIB * gpus - model.parameters * model.element) / model.cache_per_token
        mean = prompt_tokens + sum(lengths.completions) / len(lengths.completions)
        return [count for count in proposals.more_slots(config) if count * mean <= room]

    known = Basis(lengths, None, price, fits, slots, DOUBT["estimated"])
    bare = _splits(hardware.gpus, config.evaluation.actors, model, gpu)
    choices = ((split, proposals.choose_meshes(configfile.change(config, split), settings, fits)) for split in bare)
    divisions = [(split, mesh) for split, chosen in choices for mesh in chosen]
    has_meshes = any(mesh != config.learner.mesh for _, mesh in divisions)
    splits = [(*split, proposals.mesh_override(mesh)) if has_meshes else split for split, mesh in divisions]
    if not splits:
        raise ConfigError(
            f"no division of {hardware.gpus} {hardware.kind} ({gpu.gib} GiB) holds ranks and engines of "
            f"{model.parameters:,} parameters: see `streamppo check`"
        )
    configured_gpus = config.learner.ranks * config.learner.gpus + config.engines * config.rollout.gpus
    first = () if configured_gpus == hardware.gpus and fits(config) else splits[0]
    echo(
        f"{hardware.gpus} {hardware.kind}, {model.parameters:,} parameters; prompts of {prompt_tokens:,.0f} and "
        f"completions of {sum(lengths.completions) / DRAWS:,.0f} tokens on average, up to {max(lengths.completions):,}",
        "",
    )
    tried = proposals.improve(config, known, splits, first)
    _report(tried, known, to)
    rate = tried[-1].prediction.updates_per_s
    hours = hardware.gpus * config.updates / rate / 3600
    cost = "" if hardware.price is None else f", {hours * hardware.price:,.0f} at {hardware.price:g} an hour"
    echo(f"{config.updates:,} updates take {config.updates / rate / 3600:,.1f} hours, {hours:,.0f} GPU hours{cost}")
    echo("estimated from data sheets: no run on several GPUs has been compared with it")
    return 0


def realised(run: Path) -> Realised:
    """Measure a run after the updates that a prediction skips. Raises `ConfigError` if there are too few updates."""
    skip = skipped(queue_settings(configfile.load(run / configfile.CONFIG)))
    parts = _updates_by_part(run)
    counted = [part[skip:] for part in parts if len(part) >= skip + 2]
    if not counted:
        most = max(map(len, parts), default=0)
        raise ConfigError(f"{run}: {most} updates are too few to compare; the first {skip + 1} do not count")
    seconds = sum(part[-1]["wall_s"] - part[0]["wall_s"] for part in counted)
    rows = [metrics_file.numbers(line) for part in counted for line in part[1:]]
    return Realised(
        updates_per_s=len(rows) / seconds,
        tokens_per_s=sum(row["tokens"] for row in rows) / seconds,
        lag_mean=sum(row["lag_mean"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows),
        learner_waits=sum(row["wait_s"] for row in rows) / seconds,
    )


def _updates_by_part(run: Path) -> list[list[UpdateLine]]:
    """Return the updates of each part of a run. A resumed run does not train while its next part starts."""
    parts: list[list[UpdateLine]] = [[]]
    for line in metrics_file.read(run):
        if "part" in line:
            parts.append([])
        elif "update" in line:
            parts[-1].append(line)
    return parts


def lognormal(mean: float, most: int) -> list[int]:
    """Return `DRAWS` lengths at evenly spaced quantiles of a lognormal distribution, in a fixed arbitrary order."""
    median = mean / math.exp(SPREAD**2 / 2)
    lengths = [median * math.exp(SPREAD * NormalDist().inv_cdf((n + 0.5) / DRAWS)) for n in range(DRAWS)]
    # 617 and 999 have no common factor, so each length occurs once.
    return [max(1, min(most, round(lengths[617 * n % DRAWS]))) for n in range(DRAWS)]


def _splits(gpus: int, evaluators: int, model: memory.ModelSizes, gpu: GpuType) -> list[tuple[str, ...]]:
    """Return overrides for every division of `gpus` into ranks, engines, and `evaluators` that only evaluate.

    An engine gets the fewest GPUs whose memory holds its weights twice, which leaves room for the cache.
    """
    weights = model.parameters * model.element
    wide = next((width for width in (1, 2, 4, 8) if 2 * weights / width <= ROOM * gpu.gib * GIB), 8)
    gpus -= wide * evaluators
    # The ranks fill whole nodes, or their number divides a node's GPUs.
    is_round = (ranks for ranks in range(1, gpus) if ranks % roofline.NODE == 0 or roofline.NODE % ranks == 0)
    counts = [ranks for ranks in is_round if (gpus - ranks) % wide == 0]
    return [
        ("learner.gpus=1", f"learner.ranks={ranks}", f"rollout.gpus={wide}", f"rollout.actors={(gpus - ranks) // wide}")
        for ranks in counts
    ]


def _report(tried: Sequence[Proposal], known: Basis, to: Path | None) -> None:
    rows = table("settings", "updates/s", "tokens/s", "learner waits", "engines busy", "lag", "p99", "max", "lost")
    for proposal in tried:
        rows.add_row(" ".join(proposal.overrides) or "as configured", *_cells(proposal.prediction))
    console().print(rows)
    best = tried[-1]
    group, low, high = least_sure(best, known)
    echo(
        "",
        f"who waits: {_longest_wait(best.prediction)}",
        f"least sure: {group}; {known.doubt:.0%} more or less of it change updates/s by {low:+.0%} or {high:+.0%}",
    )
    before, after = tried[0].config.queue, best.config.queue
    caveat = "the proposals only compare tokens per second: with a larger"
    if after.bound > before.bound:
        echo(f"{caveat} max_lag an update learns less (docs/off-policy.md)")
    if after.batch_size > before.batch_size:
        echo(f"{caveat} batch_size there are fewer updates of the same tokens")
    if to:
        rows_written = [{"overrides": proposal.overrides, **_numbers(proposal.prediction)} for proposal in tried]
        _write(to, {"proposals": rows_written, "costs": known.price(best.config)._asdict()})


def least_sure(proposal: Proposal, known: Basis) -> tuple[str, float, float]:
    """Return the group of costs that changes updates/s most, and the changes with its costs higher and lower."""
    costs, base = known.price(proposal.config), proposal.prediction.updates_per_s

    def change(group: str, factor: float) -> float:
        scaled = costs._replace(**{name: getattr(costs, name) * factor for name in GROUPS[group]})
        return proposals.predict(proposal.config, known, costs=scaled).updates_per_s / base - 1

    more = {group: change(group, 1 + known.doubt) for group in GROUPS}
    group = max(more, key=lambda name: abs(more[name]))
    return group, more[group], change(group, 1 / (1 + known.doubt))


def compare_run(run: Path, config: Config, known: Basis) -> Comparison:
    """Compare `run` with the prediction for `config`. Raises `ConfigError`."""
    return Comparison(proposals.predict(config, known, COMPARED), realised(run))


def compare(runs: Sequence[Path], folders: Sequence[Path]) -> list[Comparison]:
    """Compare each run with its prediction from costs of the runs in `folders`. Raises `StreamppoError`."""
    known = basis([measured.read(folder) for folder in folders], Assumed())
    return [compare_run(run, configfile.load(configfile.existing(run) / configfile.CONFIG), known) for run in runs]


def _print_comparison(comparison: Comparison, to: Path | None) -> int:
    rows = table("", *COLUMNS)
    for name, cells in comparison.rows():
        rows.add_row(name, *cells)
    console().print(rows)
    if to:
        _write(to, {"predicted": _numbers(comparison.predicted), "realised": comparison.realised._asdict()})
    return 0


def _write(to: Path, content: object) -> None:
    durable.write_output(to, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n", RunError)


def _cells(prediction: Prediction) -> list[str]:
    numbers = [f"{prediction.updates_per_s:.3g}", f"{prediction.tokens_per_s:,.0f}", f"{prediction.learner_waits:.0%}"]
    numbers += [f"{prediction.engines_busy:.0%}", f"{prediction.lag_mean:.2f}"]
    return [*numbers, str(prediction.lag_quantile(0.99)), str(max(prediction.lags)), f"{prediction.tokens_lost:.1%}"]


def _longest_wait(prediction: Prediction) -> str:
    learner, engines = prediction.learner_waits, 1 - prediction.engines_busy
    if max(learner, engines) < WAITS:
        return "nobody for more than a tenth of the time"
    if learner >= engines:
        return f"the learner, {learner:.0%} of the time: more engines or trajectories in flight help"
    return f"engines, {engines:.0%} of the time: more ranks or fewer engines help"


def _numbers(prediction: Prediction) -> dict[str, object]:
    rates = {name: value for name, value in prediction._asdict().items() if name != "lags"}
    lags = {f"lag_p{percent}": prediction.lag_quantile(percent / 100) for percent in (50, 99)}
    return {**rates, "lag_mean": prediction.lag_mean, **lags, "lag_max": max(prediction.lags)}
