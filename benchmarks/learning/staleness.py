"""Compare segments with rules for whole completions on heavy-tailed answers: time to accuracy, and lost tokens.

    python benchmarks/learning/staleness.py --json staleness.json --plot staleness.png [--only pareto] [--max-lag 2 4]

Every case is a whole run with two rollout actors on the task of ciphers.py (answers of 1 to 32 letters); all runs of a
seed begin with the same model. Time is simulated (durations: `Costs` in simulated.py), so that runs are reproducible:
the learner is slightly slower than the engines, and the longest answer takes as long as four updates.

    sync                                `max_lag = 0`
    segments                            trains on segments of unfinished completions
    segments-N                          `segments`, with a cut every N tokens
    segments-detached                   `segments`, with contexts without gradient, at a third of their cost
    mask drop wait windowed             `queue.too_old` for whole completions
    adaptive, adaptive-segments         an adaptive lag up to the bound, for whole completions and for segments

A batch is a fixed number of trajectories in all cases. The goals were set before the first run. Every run is appended
to staleness.jsonl when it ends: the same command continues after the stored runs, seed by seed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import ciphers, plots, simulated, world
from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.runs import Goal, machine, table, told
from benchmarks.lib.simulated import Costs, Found
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.model import tiny

CONFIG = Path(__file__).parent / "ciphers.toml"
SHAPES = ("pareto", "lognormal")
MAX_LAGS = (4, 2, 1, 16)
MEDIAN = 2
"""Median number of letters of an answer."""
SMALL = (
    "queue.batch_size=128",
    "rollout.actors=2",
    "rollout.slots=64",
    "rollout.in_flight=64",
    f"rollout.max_tokens={MEDIAN * ciphers.SPREAD + 2}",
    "model.tiny.target_accuracy=0.3",
    "algorithm.entropy=0",
    "learner.lr=7e-4",
    "learner.decay=linear",
    "evaluation.every=15",
)
"""Overrides of ciphers.toml, with which a run takes a minute and a half."""
SYNC, SEGMENTS = "sync", "segments"
WHOLE = ("mask", "drop", "wait", "windowed")
STEERED = ("adaptive", "adaptive-segments")
RULES = (SYNC, SEGMENTS, *WHOLE, *STEERED, "segments-4", "segments-8", "segments-16", "segments-detached")
TARGET = 0.55
"""The held-out accuracy for the time to accuracy. The initial one is 0.2 to 0.35."""
LAST = 3
"""The final accuracy is the mean of the last `LAST` evaluations."""
JUDGED = 4
"""The lag bound of the goals of speed."""
GOALS = {
    "sync": Goal("segments: time to accuracy, synchronous over segments", least=2.8),
    "whole": Goal("segments: time to accuracy, best rule for whole completions over segments", least=1.3),
    "accuracy": Goal("segments: final accuracy over synchronous", least=0.98),
    "bias": Goal("segments: share of sampled tokens that were dropped or masked", most=0.0),
    "lag": Goal("segments: greatest lag over the bound", most=1.0),
    "idle": Goal("segments: idle share of the learner", most=0.05),
    "steered": Goal("adaptive: trained tokens/s over those of the best fixed lag", least=0.9),
}


class Case(NamedTuple):
    """One run."""

    lengths: str
    rule: str
    max_lag: int
    seed: int


def main() -> None:
    """Measure the chosen cases; print a table and the verdicts, and write them with the machine's description."""
    options = _options()
    about, campaign = machine(), Campaign(options.json)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        world.alone(Path(folder))
        for case in cases(options.only, options.rules, options.max_lag, options.seeds):
            key = {**case._asdict(), "updates": options.updates, **({"set": options.set} if options.set else {})}
            more = [f"updates={options.updates}", *options.set]
            rows.append(campaign.row(key, partial(_run, case, more, Path(folder))))
            print(json.dumps(_short(rows[-1])), flush=True)
            if options.json:
                result = {"machine": about, "costs": Costs()._asdict(), "goals": judge(rows), "runs": rows}
                options.json.write_text(json.dumps(result, indent=1) + "\n")
        torch.distributed.destroy_process_group()
    print(table([_short(row) for row in rows]), *map(told, judge(rows)), sep="\n")
    if options.plot:
        _plot(rows, options.plot)


def _short(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "accuracies"}


def cases(shapes: Sequence[str], rules: Sequence[str], max_lags: Sequence[int], seeds: Sequence[int]) -> Iterator[Case]:
    """List the cases, seed by seed; a lag bound of 0 has only the case `sync`."""
    for seed, shape in product(seeds, shapes):
        if SYNC in rules:
            yield Case(shape, SYNC, 0, seed)
        yield from (Case(shape, rule, lag, seed) for lag in max_lags for rule in rules if rule != SYNC)


def overrides(case: Case, data: Path, model: Path, more: Sequence[str]) -> list[str]:
    """Return the overrides of ciphers.toml for one case, `more` included."""
    too_old = case.rule if case.rule in WHOLE else "mask"
    steered = f"{{kind='adaptive',at_most={case.max_lag}}}"
    rule, _, most = case.rule.partition("-")
    cuts = f"queue.segments={{max_tokens={most},explained=0}}" if most.isdigit() else "queue.segments={}"
    cuts = "queue.segments={prefix='detached'}" if most == "detached" else cuts
    return [
        *SMALL,
        f"seed={case.seed}",
        f"model.path={model}",
        f"task.data={data / 'train.jsonl'}",
        f"task.evaluation={data / 'held_out.jsonl'}",
        f"queue.max_lag={steered if case.rule in STEERED else case.max_lag}",
        "queue.ahead=max_lag",
        f"queue.too_old={too_old}",
        *([cuts] if SEGMENTS in (rule, most) else []),
        *more,
    ]


def measure(config: Config, found: Found) -> dict[str, Any]:
    """Return the measurements of one run; its time is counted from the end of the first update."""
    queue, seconds = found.queue, found.seconds
    assert queue is not None, "the run has ended"
    when = [0.0, *(at - seconds[0] for at in seconds)]
    accuracies = [(version, when[version], accuracy) for version, accuracy in found.accuracies]
    trained, masked = (sum(one[name] for one in found.metrics) for name in ("tokens_trained", "tokens_too_old"))
    lost = masked + queue.tokens["too_old"]
    lags = [(lag, count) for update in found.lags for lag, count in update.items() if lag <= config.queue.bound]
    return {
        "accuracy": statistics.fmean(accuracy for _, accuracy in found.accuracies[-LAST:]),
        "seconds": when[-1],
        "to_target_s": next((at for _, at, accuracy in accuracies if accuracy >= TARGET), None),
        "lag_mean": sum(lag * count for lag, count in lags) / sum(count for _, count in lags),
        "lag_max": max(lag for update in found.lags for lag in update),
        "lost_share": lost / (trained + lost),
        "mean_length": trained / config.updates / config.queue.batch_size,
        "learner_idle_share": sum(found.waits[1:]) / when[-1],
        "engine_idle_share": sum(one.idle_s for one in found.engines)
        / sum(one.busy_s + one.idle_s for one in found.engines),
        "trained_tokens_per_s": trained / when[-1],
        "segments_cut": queue.cut,
        "ess": statistics.fmean(one["ess"] for one in found.metrics),
        "accuracies": accuracies,
    }


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdict on every goal, for each shape of lengths. Times are compared within a seed."""
    verdicts: list[dict[str, Any]] = []
    for shape in dict.fromkeys(row["lengths"] for row in rows):
        of_shape = [row for row in rows if row["lengths"] == shape]
        cut = [row for row in of_shape if row["rule"] == SEGMENTS]
        found: dict[str, list[float]] = {
            "sync": [*_times(of_shape, (SYNC,))],
            "whole": [*_times(of_shape, WHOLE)],
            "accuracy": [row["accuracy"] / sync["accuracy"] for row, sync in _with_sync(of_shape, cut)],
            # For a bound, the worst run counts.
            "bias": [max(row["lost_share"] for row in cut)] if cut else [],
            "lag": [max(row["lag_max"] / row["max_lag"] for row in cut)] if cut else [],
            "idle": [row["learner_idle_share"] for row in cut if row["max_lag"] == JUDGED],
            "steered": [*_speeds(of_shape)],
        }
        verdicts += [{**GOALS[name].verdict(*values), "lengths": shape} for name, values in found.items()]
    return verdicts


def _times(rows: Sequence[Mapping[str, Any]], rules: Sequence[str]) -> Iterator[float]:
    """For each seed, the shortest time to the target of `rules` over that of segments, if both reached it."""
    for seed in sorted({row["seed"] for row in rows}):
        of_seed = [row for row in rows if row["seed"] == seed and row["to_target_s"] is not None]
        ours = [row["to_target_s"] for row in of_seed if row["rule"] == SEGMENTS and row["max_lag"] == JUDGED]
        theirs = [row["to_target_s"] for row in of_seed if row["rule"] in rules]
        if ours and theirs:
            yield min(theirs) / ours[0]


def _speeds(rows: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """For each adaptive run, its trained tokens/s over the most of the seed's `mask` runs."""
    fixed = [row for row in rows if row["rule"] == WHOLE[0]]
    for steered in (row for row in rows if row["rule"] == STEERED[0]):
        if speeds := [row["trained_tokens_per_s"] for row in fixed if row["seed"] == steered["seed"]]:
            yield steered["trained_tokens_per_s"] / max(speeds)


def _with_sync(
    rows: Sequence[Mapping[str, Any]], cut: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    synchronous = {row["seed"]: row for row in rows if row["rule"] == SYNC}
    return ((row, synchronous[row["seed"]]) for row in cut if row["seed"] in synchronous)


def _run(case: Case, more: Sequence[str], folder: Path) -> dict[str, Any]:
    data, model = folder / case.lengths, folder / f"model-{case.lengths}-{case.seed}"
    if not data.is_dir():
        ciphers.write(data, case.lengths, median=MEDIAN)
    config = configfile.load(CONFIG, overrides(case, data, model, more))
    if not model.is_dir():
        tiny.make(config, model)
    with tempfile.TemporaryDirectory() as run:
        return measure(config, simulated.run(config, model, Path(run) / "run", Costs()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--max-lag", type=int, nargs="+", default=MAX_LAGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="for all runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def _plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw held-out accuracy over time, one line for each rule, all seeds, at the lag bound of the goals."""
    for axis, shape, of_shape in plots.by_lengths(path, rows):
        judged = [row for row in of_shape if row["max_lag"] in (0, JUDGED)]
        for number, rule in enumerate(dict.fromkeys(row["rule"] for row in judged)):
            for place, row in enumerate(row for row in judged if row["rule"] == rule):
                _, times, found = zip(*row["accuracies"], strict=True)
                axis.plot(times, found, color=f"C{number}", label=None if place else rule)
        axis.set(title=f"{shape} lengths, max_lag {JUDGED}", xlabel="simulated seconds", ylabel="held-out accuracy")
        axis.legend()


if __name__ == "__main__":
    main()
