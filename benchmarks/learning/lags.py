"""Accuracy with old data: corrections at an exact lag, and ways to steer the lag.

    python benchmarks/learning/lags.py --part fixed --json lags.json --plot lags.png [--seeds 1 2 3] [--only mask]
        [--lags 0 16]

Each run is one process (benchmarks/lib/world.py), and all tokens of the batch of update u are sampled by version
u - lag. A real run with that `max_lag` has younger tokens too: this is its hardest case, and it does not depend on the
speed of a run. The task is sums of a number up to 19 and one of two digits, with 128 completions per update; all runs
of a seed begin with the same model.

    fixed       corrections, V-trace and the ratio to the behavior policy, with gae and with grpo, at each lag
    steered     eight policy losses, four minibatches, at fixed lags, and with the lag steered up to 64 (`adaptive`
                also up to 4 and 16):
                `adaptive` is `max_lag = adaptive`: ESS steers the lag and the learning rate
                `alone` steers the lag only (`lr_by_ess = off`)
                `rate` steers the learning rate only (VCPO, https://arxiv.org/abs/2602.17616, without its baseline)
                `cosine` steers the lag by the cosine of successive gradients (https://arxiv.org/abs/2603.01501)
    default     the task of configs/math.toml over 1,100 updates, at lag 0 and 16; at 16 also with `rate`, with `rate`
                and `mask`, and with both and a cosine decay of the learning rate to 0 (`gentle`), the last of them also
                with a steered lag

A run has collapsed if its final held-out accuracy is below that of its initial model.
The goals were set before the first run. Every run is appended to lags.jsonl when it ends: the same command continues
after the stored runs, seed by seed.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import plots, world
from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.pace import Adaptive, Fixed, Pace, batches, step
from benchmarks.lib.runs import PLAIN, Goal, machine, table, told
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.learner.batch.fetch import lag_histogram
from streamppo.learner.batch.padded import PaddedBatch
from streamppo.learner.model import policy, tiny

CONFIG = Path("configs/math.toml")
LAGS = (0, 1, 2, 4, 8, 16, 32, 64)
AT_MOST = 64
"""The bound of a steered lag."""
SMALL = ("task.first=[1,19]", "queue.batch_size=128", "updates=300", "evaluation.prompts=256")
"""A task and batch size for a run of half a minute."""
LONG = ("updates=1100",)
TREATMENTS = {
    "off": ("algorithm.correction.kind=off",),
    "truncate": (),
    "mask": ("algorithm.correction.kind=mask",),
    "second_moment": ("algorithm.correction.kind=second_moment",),
    "vtrace": ("algorithm.advantage.kind=vtrace",),
    "behavior": ("algorithm.proximal=behavior", "algorithm.correction.kind=off"),
}
GENTLE = (*TREATMENTS["mask"], "learner.decay=cosine", "learner.final_lr_share=0")
"""For old data: a learning rate that decays earlier, and to 0."""
CAREFUL = 0.8
"""The target ESS of the steered lag on the default task."""
LOSSES = ("clip", "cispo", "gspo", "sapo", "dppo_tv", "ipo", "importance_weighted", "reinforce")
STEERED_LAGS = (0, 4, 16, 64)
PACES = ("fixed", "adaptive", "alone", "cosine", "rate")
ALIGNED, UNALIGNED = 0.3, 0.1
"""Cosines of successive gradients: above the first the admitted lag is halved, below the second it grows."""
GOALS = {
    "default": Goal("default task: final accuracy at lag 16 over lag 0", least=0.98),
    "masked": Goal("default task, masked, with lr_by_ess: final accuracy at lag 16 over lag 0", least=0.98),
    "gentle": Goal("default task, gentle: final accuracy at lag 16 over lag 0", least=0.98),
    "collapses": Goal("adaptive: runs that collapsed", most=0),
    "accuracy": Goal("adaptive: final accuracy over synchronous", least=0.98),
    "lag": Goal("adaptive: mean lag of trained tokens", least=16),
}


class Case(NamedTuple):
    """One run; `pace` is the rule that chooses the lag."""

    part: str
    treatment: str
    advantage: str
    pace: str
    lag: int
    seed: int


def main() -> None:
    """Measure the chosen cases; print a table and the verdicts, and write them with the machine's description."""
    options = _options()
    about, campaign = machine(), Campaign(options.json)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        world.alone(Path(folder))
        for case in cases(options.part, options.seeds, options.only, options.lags, options.paces):
            key = {**case._asdict(), "updates": options.updates, **({"least_ess": options.ess} if options.ess else {})}
            key |= {"set": options.set} if options.set else {}
            chosen = [*overrides(case, options.updates, options.ess), *options.set]
            rows.append(campaign.row(key, partial(_measured, case, chosen, Path(folder))))
            print(_line(rows[-1]), flush=True)
        torch.distributed.destroy_process_group()
    lines, verdicts = summed(rows), judge(rows)
    print(table(lines), *map(told, verdicts), sep="\n")
    if options.json:
        result = {"machine": about, "goals": verdicts, "summary": lines, "runs": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        _plot(lines, options.plot)


def cases(
    part: str,
    seeds: Sequence[int],
    only: Sequence[str] | None = None,
    lags: Sequence[int] | None = None,
    paces: Sequence[str] | None = None,
) -> Iterator[Case]:
    """List the cases of a part, seed by seed."""
    for seed, case in product(seeds, _of_part(part)):
        is_chosen = (not only or case.treatment in only) and (not paces or case.pace in paces)
        if is_chosen and (not lags or case.pace != "fixed" or case.lag in lags):
            yield case._replace(seed=seed)


def _of_part(part: str) -> Iterator[Case]:
    match part:
        case "fixed":
            for lag, treatment, advantage in product(LAGS, TREATMENTS, ("gae", "grpo")):
                if advantage == "gae" or treatment != "vtrace":
                    yield Case(part, treatment, advantage, "fixed", lag, 0)
        case "steered":
            for loss in LOSSES:
                yield from (Case(part, loss, "gae", "fixed", lag, 0) for lag in STEERED_LAGS)
                yield from (Case(part, loss, "gae", pace, AT_MOST, 0) for pace in ("adaptive", "alone", "cosine"))
                yield from (Case(part, loss, "gae", "adaptive", lag, 0) for lag in STEERED_LAGS[1:-1])
                yield from (Case(part, loss, "gae", "rate", lag, 0) for lag in STEERED_LAGS[1:])
        case _:
            yield from (Case(part, "truncate", "gae", "fixed", lag, 0) for lag in (0, 16))
            yield from (Case(part, treatment, "gae", "rate", 16, 0) for treatment in ("truncate", "mask", "gentle"))
            yield Case(part, "gentle", "gae", "adaptive", AT_MOST, 0)


def overrides(case: Case, updates: int = 0, ess: float = 0.0) -> list[str]:
    """Return the overrides of configs/math.toml for one case, `PLAIN` first; 0 stands for the part's default."""
    least = ess or (CAREFUL if case.part == "default" else 0.5)
    lag = f"{{kind='adaptive',at_most={case.lag},ess={least}}}" if case.pace in ("adaptive", "alone") else case.lag
    chosen = [*PLAIN, *LONG, f"seed={case.seed}", f"queue.max_lag={lag}", *(() if case.part == "default" else SMALL)]
    chosen.append(f"learner.lr_by_ess={'on' if case.pace in ('rate', 'adaptive') else 'off'}")
    if updates:
        chosen.append(f"updates={updates}")
    if case.advantage == "grpo":
        chosen.append("algorithm.advantage={kind='grpo'}")
    if case.part == "steered":
        return [*chosen, f"algorithm.policy_loss.kind={case.treatment}", "learner.minibatches=4"]
    return [*chosen, *(GENTLE if case.treatment == "gentle" else TREATMENTS[case.treatment])]


# --- a run -----------------------------------------------------------------------------------------------------


def _measured(case: Case, chosen: Sequence[str], folder: Path) -> Mapping[str, Any]:
    config = configfile.load(CONFIG, chosen)
    model = folder / f"{'default' if case.part == 'default' else 'small'}-{case.seed}"
    if not model.is_dir():
        tiny.make(config, model)
    return asyncio.run(measure(case, config, model))


async def measure(case: Case, config: Config, model: Path) -> Mapping[str, Any]:
    """Sample, update and swap in turns, with as many batches ahead as the lag requires."""
    made = await world.build(config, model, slots=256, max_total_tokens=32)
    pace = _pace(case, config, made)
    accuracies, found = [await world.accuracy(made)], defaultdict[str, list[float]](list)
    async for batch in batches(made, pace):
        version = batch.version
        _, metrics, scheduled = step(made, pace, batch)
        await made.swap(version + 1)
        lag, share = max(lag_histogram(batch)), metrics["lr"] / scheduled
        for name, value in {"reward": metrics["reward"], "ess": metrics["ess"], "lag": lag, "share": share}.items():
            found[name].append(value)
        if (version + 1) % max(1, config.updates // 10) == 0:
            accuracies.append(await world.accuracy(made))
    await made.engine.stop()
    return {
        "accuracy": accuracies[-1],
        "first_accuracy": accuracies[0],
        "reward": statistics.fmean(found["reward"][-20:]),
        "ess": statistics.fmean(found["ess"]),
        "lag_mean": statistics.fmean(found["lag"]),
        "lag_max": max(found["lag"]),
        "lr_share": statistics.fmean(found["share"]),
        "accuracies": accuracies,
        "lags": found["lag"][:: max(1, config.updates // 50)],
    }


def _pace(case: Case, config: Config, made: world.World) -> Pace:
    match case.pace:
        case "adaptive" | "alone":
            return Adaptive(config)
        case "cosine":
            return Cosine(made.updater.policy)
        case _:
            return Fixed(case.lag)


class Cosine(Fixed):
    """Admit one more version of lag while successive gradients are nearly orthogonal; halve it if they are aligned."""

    def __init__(self, trained: policy.Policy) -> None:
        super().__init__(1)
        self._policy = trained
        self._before: Tensor | None = None

    def after(self, batch: PaddedBatch, metrics: Mapping[str, float]) -> None:
        """Compare the gradients of the last steps of this and of the previous update."""
        gradients = [policy.local(one.grad).flatten() for one in self._policy.lm.parameters() if one.grad is not None]
        gradient, before = torch.cat(gradients), self._before
        self._before = gradient
        if before is None:
            return
        cosine = torch.nn.functional.cosine_similarity(gradient, before, dim=0).item()
        if cosine > ALIGNED:
            self.admitted //= 2
        elif abs(cosine) < UNALIGNED:
            self.admitted = min(AT_MOST, self.admitted + 1)


# --- what came of it -------------------------------------------------------------------------------------------


def collapsed(row: Row) -> bool:
    """Return True if the final accuracy is below the initial one."""
    return row["accuracy"] < row["first_accuracy"]


def summed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians over seeds, with minimum and maximum of the final accuracy, and the number of collapses."""
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in ("part", "treatment", "advantage", "pace", "lag"))].append(row)
    lines: list[dict[str, Any]] = []
    for (part, treatment, advantage, pace, lag), some in groups.items():
        line = {"part": part, "treatment": treatment, "advantage": advantage, "pace": pace, "lag": lag}
        found = [row["accuracy"] for row in some]
        line |= {"seeds": len(some), "accuracy": statistics.median(found), "least": min(found), "most": max(found)}
        line |= {name: statistics.median(row[name] for row in some) for name in ("ess", "lag_mean", "lr_share")}
        lines.append({**line, "collapsed": sum(map(collapsed, some))})
    return lines


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the verdict on every goal; accuracies are compared within a seed and a loss.

    Comparisons with a collapsed synchronous run are left out.
    """
    fresh = [row for row in rows if row["pace"] == "fixed" and row["lag"] == 0]
    synchronous = {_world_of(row): row for row in fresh if not collapsed(row)}

    def over_synchronous(some: Sequence[Row]) -> list[float]:
        return [
            row["accuracy"] / synchronous[_world_of(row)]["accuracy"] for row in some if _world_of(row) in synchronous
        ]

    late = [row for row in rows if row["part"] == "default" and row["lag"] > 0]
    gentle = [row for row in late if row["treatment"] == "gentle" and row["pace"] == "rate"]
    steered = [row for row in rows if row["pace"] == "adaptive"]
    adaptive = [row for row in steered if row["lag"] == AT_MOST]
    measured = {
        "default": over_synchronous([row for row in late if row["pace"] == "fixed"]),
        "masked": over_synchronous([row for row in late if row["treatment"] == "mask"]),
        "gentle": over_synchronous(gentle),
        "collapses": [sum(map(collapsed, steered))] if steered else [],
        "accuracy": over_synchronous(adaptive),
        "lag": [row["lag_mean"] for row in adaptive],
    }
    return [goal.verdict(*measured[name]) for name, goal in GOALS.items()]


def _world_of(row: Row) -> tuple[Any, ...]:
    # At lag 0 all corrections are equal.
    treatment = "" if row["part"] == "default" else row["treatment"]
    return row["part"], treatment, row["advantage"], row["seed"]


def _line(row: Row) -> str:
    numbers = "  ".join(f"{name} {row[name]:.3f}" for name in ("accuracy", "reward", "ess", "lag_mean", "lr_share"))
    names = "  ".join(str(row[name]) for name in ("seed", "treatment", "advantage", "pace", "lag"))
    return f"{names}  {numbers}{'  collapsed' if collapsed(row) else ''}"


def _plot(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the final accuracy by lag, a line for each treatment; steered runs at their mean lag."""
    advantages = list(dict.fromkeys(line["advantage"] for line in lines))
    with plots.axes(path, len(advantages), sharey=True) as made:
        for axis, advantage in zip(made, advantages, strict=True):
            of_axis = [line for line in lines if line["advantage"] == advantage]
            for number, name in enumerate(dict.fromkeys(line["treatment"] for line in lines)):
                some = [line for line in of_axis if line["treatment"] == name]
                if not some:
                    continue
                fixed = sorted((line["lag"], line["accuracy"]) for line in some if line["pace"] == "fixed")
                axis.plot(*zip(*fixed, strict=True), marker="o", color=f"C{number}", label=name)
                for pace, marker in (("adaptive", "*"), ("cosine", "x")):
                    found = [(line["lag_mean"], line["accuracy"]) for line in some if line["pace"] == pace]
                    axis.plot(*zip(*found, strict=True) if found else ((), ()), marker, color=f"C{number}")
            axis.set(title=advantage, xlabel="lag, versions", ylim=(0, 1))
            axis.set_xscale("symlog", linthresh=1)
            axis.legend(fontsize="small")
        made[0].set(ylabel="held-out accuracy at the end, median")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("fixed", "steered", "default"), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--only", nargs="+", choices=[*TREATMENTS, "gentle", *LOSSES])
    parser.add_argument("--lags", type=int, nargs="+", help="of those that are fixed")
    parser.add_argument("--paces", nargs="+", choices=PACES)
    parser.add_argument("--updates", type=int, default=0, help="of each run; 0 are as many as the part has")
    parser.add_argument("--ess", type=float, default=0.0, help="max_lag.ess where the lag is steered; 0 is the part's")
    parser.add_argument("--set", nargs="+", default=[], help="further fields of the configuration, of every case")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
