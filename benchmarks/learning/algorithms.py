"""Compare all policy losses, corrections, advantages, critics and proximal policies on the default job, by lag bound.

    python benchmarks/learning/algorithms.py --seeds 1 2 3 --max-lag 0 2 8 --parallel 2 --json out.json --plot out.png

Each run changes one choice of `PLAIN` on the task of configs/math.toml (with four minibatches if the ratio matters).
All runs of a seed begin with the same warm-started model.
Reported as mean and range over the seeds: mean reward of the last ten updates, held-out accuracy, the updates until
that mean reward reached --reach, and the realised lag.
With `--json out.json` every run is appended to out.jsonl when it ends: the same command continues after the stored
runs. Seeds run one after another, so that the stored runs make a whole table of the first seeds.
The plot needs matplotlib (`pip install streamppo[plots]`).
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import plots
from benchmarks.lib.campaign import Campaign
from benchmarks.lib.draw import SEVERAL
from benchmarks.lib.runs import PLAIN, Run, machine, run

CONFIG = Path("configs/math.toml")
WINDOW = 10
MINIBATCHES = "learner.minibatches=4"
"""With a single step in an update, current equals proximal, and most policy losses are equal."""
LOSSES = (
    "clip",
    "cispo",
    "gspo",
    "gmpo",
    "vespo",
    "sequence_clip",
    "reinforce",
    "importance_weighted",
    "dppo_tv",
    "dppo_kl",
    "ipo",
    "sapo",
)
"""Policy losses without required fields."""
FIRST = "MODEL"
"""Replaced by the folder of the initial model of the seed's runs."""
EXPLORATIONS = ("off", "top_entropy", "clip_cov", "kl_cov")
CHOICES: dict[str, list[str]] = {
    "default": [],
    **{f"loss {kind}": [f"algorithm.policy_loss.kind={kind}", MINIBATCHES] for kind in LOSSES},
    "loss function": ["algorithm.policy_loss={kind='function', function='examples/custom_loss.py:loss'}", MINIBATCHES],
    "correction off": ["algorithm.correction.kind=off"],
    "correction mask": ["algorithm.correction.kind=mask"],
    "correction truncate, reject": [
        "algorithm.correction={kind='truncate', reject=[{kind='geometric', band=[0.5, 2.0]}]}"
    ],
    "correction reject": [
        "algorithm.correction={kind='reject', reject=[{kind='geometric', band=[0.9, 1.1]}, {kind='k3', at_most=0.05}]}"
    ],
    "correction second_moment": ["algorithm.correction.kind=second_moment"],
    "correction topr": ["algorithm.correction.kind=topr"],
    "correction topr, negatives a quarter": ["algorithm.correction.kind=topr", "algorithm.negative_weight=0.25"],
    "correction function": ["algorithm.correction={kind='function', function='examples/custom_correction.py:weights'}"],
    "filter truncated": ["algorithm.filters=[{kind='truncated'}]"],
    "filter off_policy_negative": ["algorithm.filters=[{kind='off_policy_negative', delta=0.05}]"],
    **{
        f"advantage {kind}": [f"algorithm.advantage.kind={kind}"]
        for kind in (
            "vtrace",
            "sequence",
            "grpo",
            "dr_grpo",
            "rloo",
            "maxrl",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
        )
    },
    "advantage gdpo": ["algorithm.advantage={kind='gdpo', weights={right=1.0, again=0.5}}", SEVERAL],
    "advantage function": ["algorithm.advantage={kind='function', function='examples/custom_advantage.py:advantage'}"],
    **{f"exploration {kind}": [f"algorithm.exploration.kind={kind}", MINIBATCHES] for kind in EXPLORATIONS},
    **{
        f"reference {name}": ["algorithm.kl.loss_beta=0.05", f"algorithm.kl.follow_every={every}"]
        for name, every in (("first model", 0), ("follows", 20))
    },
    "entropy control": ["algorithm.entropy_control.target=0.5"],
    "aggregation prompt-mean": ["algorithm.aggregation=prompt-mean"],
    "positive_nll 0.1": ["algorithm.positive_nll=0.1"],
    "teacher, the first model": ["algorithm.teacher={model='MODEL', weight=0.05}"],
    "top_p 0.9": ["rollout.top_p=0.9"],
    "top_k 8": ["rollout.top_k=8"],
    "critic scratch": ["algorithm.critic.model=scratch"],
    "critic policy": ["algorithm.critic.model=policy"],
    "critic policy, 4 epochs": ["algorithm.critic.model=policy", "algorithm.critic.epochs=4"],
    **{
        f"critic policy, proximal {kind}": [f"algorithm.proximal={kind}", "algorithm.critic.model=policy", MINIBATCHES]
        for kind in ("recompute", "loglinear")
    },
    "proximal behavior": ["algorithm.proximal=behavior", "algorithm.correction.kind=off"],
}


class Job(NamedTuple):
    """One run: a choice, its lag bound, its seed."""

    choice: str
    max_lag: int
    seed: int


def main() -> None:
    options = _options()
    campaign = Campaign(options.json)
    choices: list[str] = options.only or list(CHOICES)
    wanted = [Job(choice, lag, seed) for seed in options.seeds for choice in choices for lag in options.max_lag]
    with tempfile.TemporaryDirectory() as folder:
        missing = [job for job in wanted if not campaign.find(job._asdict())]
        for row in _measured(missing, options, Path(folder)):
            print(_line(row), flush=True)
            campaign.add(row)
    table = summed([row for row in campaign.rows if _job(row) in wanted])
    print("\n".join(markdown(table)))
    if options.json:
        result = {"machine": machine(), "updates": options.updates, "reach": options.reach, "table": table}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        _plot(table, options.plot)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-lag", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(CHOICES), metavar="CHOICE", help="for example 'loss cispo'")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time; the lags that come about depend on it")
    parser.add_argument("--reach", type=float, default=0.25, help="a reward to count the updates until")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def _measured(jobs: Sequence[Job], options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of `jobs` in the order in which they end."""
    models = {seed: _model(folder, seed) for seed in sorted({job.seed for job in jobs})}

    def measure(job: Job) -> dict[str, Any]:
        model = str(models[job.seed])
        common = [*PLAIN, f"seed={job.seed}", f"updates={options.updates}", f"queue.max_lag={job.max_lag}"]
        common += ["queue.ahead=max_lag", "evaluation.every=0", "checkpoint.every=0", f"model.path={model}"]
        chosen = [one.replace(FIRST, model) for one in CHOICES[job.choice]]
        return {**job._asdict(), **_described(run(CONFIG, [*common, *chosen]), options.reach)}

    with ThreadPoolExecutor(options.parallel) as pool:
        for done in as_completed([pool.submit(measure, job) for job in jobs]):
            yield done.result()


def _model(folder: Path, seed: int) -> Path:
    """Make the warm-started model of all runs of a seed."""
    from streamppo.config import file as configfile
    from streamppo.learner.model import tiny

    model = folder / f"model-{seed}"
    tiny.make(configfile.load(CONFIG, [f"seed={seed}"]), model)
    return model


def _described(done: Run, reach: float) -> dict[str, Any]:
    rewards = [row["reward"] for row in done.updates]
    smooth = [sum(rewards[max(0, n - WINDOW) : n]) / min(n, WINDOW) for n in range(1, len(rewards) + 1)]
    return {
        "reward": smooth[-1],
        "accuracy": done.summary["eval_accuracy"]["final"],
        "updates_to_reach": next((n for n, value in enumerate(smooth, start=1) if value >= reach), None),
        "mean_lag": done.summary["lag"]["mean"],
        "ess": sum(row["ess"] for row in done.updates) / len(done.updates),
        "rewards": smooth,
    }


def _job(row: dict[str, Any]) -> Job:
    return Job(row["choice"], row["max_lag"], row["seed"])


def _line(row: dict[str, Any]) -> str:
    numbers = "  ".join(f"{name} {row[name]:.3f}" for name in ("reward", "accuracy", "mean_lag", "ess"))
    return (
        f"max_lag {row['max_lag']}  seed {row['seed']}  {row['choice']:40s} {numbers}  "
        f"updates_to_reach {row['updates_to_reach']}"
    )


def summed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """[mean, minimum, maximum] over the seeds, by choice and lag bound, in the order of `CHOICES`.

    `updates_to_reach` is the mean, or None if a seed did not reach the reward.
    """
    groups: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[list(CHOICES).index(row["choice"]), row["max_lag"]].append(row)
    table: list[dict[str, Any]] = []
    for (number, max_lag), group in sorted(groups.items()):
        reached = [row["updates_to_reach"] for row in group]
        made: dict[str, Any] = {"choice": list(CHOICES)[number], "max_lag": max_lag, "seeds": len(group)}
        for name in ("reward", "accuracy", "mean_lag", "ess"):
            values = [row[name] for row in group]
            made[name] = [statistics.mean(values), min(values), max(values)]
        made["updates_to_reach"] = None if None in reached else statistics.mean(reached)
        table.append(made)
    return table


def markdown(table: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: mean and range of the reward, and the realised lag, by lag bound."""
    lags = sorted({row["max_lag"] for row in table})
    yield "| choice | " + " | ".join(f"max_lag {lag} | lag" for lag in lags) + " |"
    yield "|---" * (1 + 2 * len(lags)) + "|"
    for choice in dict.fromkeys(row["choice"] for row in table):
        cells: list[str] = []
        for lag in lags:
            found = [row for row in table if (row["choice"], row["max_lag"]) == (choice, lag)]
            if found:
                mean, least, most = found[0]["reward"]
                cells += [f"{mean:.3f} ({least:.3f} to {most:.3f})", f"{found[0]['mean_lag'][0]:.1f}"]
            else:
                cells += ["", ""]
        yield f"| {choice} | " + " | ".join(cells) + " |"


def _plot(table: Sequence[dict[str, Any]], path: Path) -> None:
    lags = sorted({row["max_lag"] for row in table})
    choices = list(dict.fromkeys(row["choice"] for row in table))[::-1]
    height = 1.5 + 0.22 * len(choices)
    with plots.axes(path, len(lags), height=height, sharey=True, sharex=True) as axes:
        for axis, max_lag in zip(axes, lags, strict=True):
            for row in (row for row in table if row["max_lag"] == max_lag):
                mean, least, most = row["reward"]
                place = choices.index(row["choice"])
                axis.plot([least, most], [place, place], color="tab:gray", linewidth=1)
                axis.plot([mean], [place], "o", color="tab:blue", markersize=4)
            if default := [
                row["reward"][0] for row in table if (row["choice"], row["max_lag"]) == ("default", max_lag)
            ]:
                axis.axvline(default[0], color="tab:orange", linewidth=0.8)
            axis.set(title=f"max_lag = {max_lag}", xlabel="reward of the last ten updates: mean and range")
            axis.grid(axis="x", alpha=0.3)
        axes[0].set_yticks(range(len(choices)), choices, fontsize="small")


if __name__ == "__main__":
    main()
