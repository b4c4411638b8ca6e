"""Every policy loss, correction, advantage estimator, critic and proximal policy on the default job, by lag bound.

    python benchmarks/algorithms.py --max-lag 0 2 8 --json out.json --plot out.png

One choice at a time is changed from configs/math.toml (and four minibatches where the ratio matters). All runs begin
with the same warm-started model.
Reported: mean reward of the last ten updates, held-out accuracy, and the updates until that reward reached --reach.
The plot needs matplotlib (`pip install streamppo[plots]`).
"""

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.draw import SEVERAL
from benchmarks.runs import Run, machine, run

CONFIG = Path("configs/math.toml")
WINDOW = 10
MINIBATCHES = "learner.minibatches=4"
"""Where an update is a single step, current is proximal and most policy losses are one and the same."""
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
"""Policy losses that need no more than their name."""
FIRST = "MODEL"
"""Becomes the folder of the model that all runs begin with."""
EXPLORATIONS = ("off", "top_entropy", "clip_cov", "kl_cov")
CHOICES: dict[str, list[str]] = {
    "default": [],
    **{f"loss {kind}": [f"algorithm.policy_loss.kind={kind}", MINIBATCHES] for kind in LOSSES},
    "loss function": ["algorithm.policy_loss={kind='function', function='examples/own_loss.py:loss'}", MINIBATCHES],
    "correction off": ["algorithm.correction.kind=off"],
    "correction mask": ["algorithm.correction.kind=mask"],
    "correction truncate, reject": [
        "algorithm.correction={kind='truncate', reject=[{kind='geometric', band=[0.5, 2.0]}]}"
    ],
    "correction reject": [
        "algorithm.correction={kind='reject', reject=[{kind='geometric', band=[0.9, 1.1]}, {kind='k3', at_most=0.05}]}"
    ],
    "correction second_moment": ["algorithm.correction.kind=second_moment"],
    "correction function": ["algorithm.correction={kind='function', function='examples/own_correction.py:weights'}"],
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
    "advantage function": ["algorithm.advantage={kind='function', function='examples/own_advantage.py:advantage'}"],
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


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder))
        chosen = {name: [one.replace(FIRST, str(model)) for one in CHOICES[name]] for name in options.only or CHOICES}
        rows: list[dict[str, Any]] = []
        for max_lag, (name, overrides) in product(options.max_lag, chosen.items()):
            common = [
                f"updates={options.updates}",
                f"queue.max_lag={max_lag}",
                "evaluation.every=0",
                f"model.path={model}",
            ]
            rows.append(
                _measure(name, max_lag, run(CONFIG, [*common, "checkpoint.every=0", *overrides]), options.reach)
            )
            print(_line(rows[-1]), flush=True)
    result = {"machine": machine(), "updates": options.updates, "reach": options.reach, "runs": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        _plot(rows, options.plot)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-lag", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--only", nargs="+", choices=list(CHOICES), metavar="CHOICE", help="for example 'loss cispo'")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--reach", type=float, default=0.25, help="a reward to count the updates until")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def _model(folder: Path) -> Path:
    """One warm-started model for all runs: the model of a run of a single update."""
    from streamppo.config import file as configfile
    from streamppo.learner import tiny

    model = folder / "model"
    tiny.make(configfile.load(CONFIG), model)
    return model


def _measure(name: str, max_lag: int, done: Run, reach: float) -> dict[str, Any]:
    rewards = [row["reward"] for row in done.updates]
    smooth = [sum(rewards[max(0, n - WINDOW) : n]) / min(n, WINDOW) for n in range(1, len(rewards) + 1)]
    return {
        "choice": name,
        "max_lag": max_lag,
        "reward": smooth[-1],
        "accuracy": done.summary["eval_accuracy"]["final"],
        "updates_to_reach": next((n for n, value in enumerate(smooth, start=1) if value >= reach), None),
        "mean_lag": done.summary["lag"]["mean"],
        "ess": sum(row["ess"] for row in done.updates) / len(done.updates),
        "rewards": smooth,
    }


def _line(row: dict[str, Any]) -> str:
    numbers = "  ".join(f"{name} {row[name]:.3f}" for name in ("reward", "accuracy", "mean_lag", "ess"))
    return f"max_lag {row['max_lag']}  {row['choice']:40s} {numbers}  updates_to_reach {row['updates_to_reach']}"


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lags = sorted({row["max_lag"] for row in rows})
    choices = list(dict.fromkeys(row["choice"] for row in rows))
    colors = pyplot.get_cmap("tab10").colors
    figure, axes = pyplot.subplots(1, len(lags), figsize=(7 * len(lags), 6), sharey=True, squeeze=False)
    for axis, max_lag in zip(axes[0], lags, strict=True):
        for row in (row for row in rows if row["max_lag"] == max_lag):
            number = choices.index(row["choice"])
            style = ("-", "--", ":")[number // len(colors)]
            steps = range(1, len(row["rewards"]) + 1)
            axis.plot(steps, row["rewards"], style, color=colors[number % len(colors)], label=row["choice"])
        axis.set(title=f"max_lag = {max_lag}", xlabel="update", ylabel="reward, mean of the last ten")
    axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
