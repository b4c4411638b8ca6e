"""How far `streamppo replay --set` tells what `streamppo fork --set` will do: 20 changes, three seeds, seven horizons.

    python benchmarks/learning/what_if.py --seeds 1 2 3 --json what-if.json [--only lr-double]

A replay trains the changed learner on the batches of the run, whose policy has sampled them; here by `bisect --set`,
which makes the same versions and evaluates them. A fork samples its own. Both begin at version 0 of a run of
configs/math.toml with 64 updates, and are compared with that run at horizons of 1 to 64 updates: `accuracy` is that of
the version, any other metric its mean over the updates from half the horizon to the horizon.

A verdict of a metric is the sign of its mean difference from the run over all seeds, and 0 if that is within two
standard errors. Where the fork has a verdict, the replay agrees, is silent, or says the opposite.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.runs import machine, table
from streamppo.telemetry import metrics_file

CONFIG = "configs/math.toml"
BASE = ("updates=64", "evaluation.every=4", "evaluation.prompts=512", "checkpoint.every=0")
CHANGES = {
    "lr-quarter": ("learner.lr=2e-4",),
    "lr-half": ("learner.lr=4e-4",),
    "lr-double": ("learner.lr=1.6e-3",),
    "lr-four": ("learner.lr=3.2e-3",),
    "no-warmup": ("learner.warmup_updates=0",),
    "one-step": ("learner.minibatches=1",),
    "eight-steps": ("learner.minibatches=8",),
    "two-epochs": ("learner.epochs=2",),
    "short-moments": ("learner.betas=[0.9,0.95]",),
    "clip-gradient": ("learner.max_grad_norm=0.1",),
    "no-entropy": ("algorithm.entropy=0",),
    "entropy-ten": ("algorithm.entropy=0.1",),
    "negatives-full": ("algorithm.negative_weight=1",),
    "no-negatives": ("algorithm.negative_weight=0",),
    "no-correction": ("algorithm.correction={kind='off'}",),
    "truncate": ("algorithm.correction={kind='truncate'}",),
    "whiten": ("algorithm.whiten.over=batch",),
    "narrow-clip": ("algorithm.policy_loss={kind='clip',range=[0.05,0.05]}",),
    "lambda": ("algorithm.advantage.lam=0.5",),
    "kl-loss": ("algorithm.kl.loss_beta=0.1",),
}
"""Written down before any of them ran."""
HORIZONS = (1, 2, 4, 8, 16, 32, 64)
METRICS = ("accuracy", "entropy", "grad_norm", "proximal_kl", "behavior_kl", "ess")
AGREES, OPPOSITE = 0.8, 0.1
"""A horizon counts if at all horizons up to it at least so many verdicts agree, and at most so many are opposite."""
Values = dict[str, list[float | None]]
"""For each metric, one number for each horizon; None is not measured."""


def main() -> None:
    """Measure what is missing, and print and write how far the verdicts agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=CHANGES, default=[*CHANGES])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about, campaign = machine(), Campaign(options.json)
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            _measure(seed, options.only, campaign, Path(folder))
    summary = summed(campaign.rows)
    print(table(summary))
    reach = horizons(summary)
    print("a replay's verdict holds for so many updates:", reach)
    if options.json:
        result = {"machine": about, "horizons": reach, "summary": summary, "runs": campaign.rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _measure(seed: int, names: Sequence[str], campaign: Campaign, folder: Path) -> None:
    missing = [name for name in names if not campaign.find({"change": name, "seed": seed})]
    if not missing:
        return
    _streamppo("run", CONFIG, "--runs", str(folder), "name=base", f"seed={seed}", *BASE)
    base = folder / "base"
    before = values(metrics_file.updates(base), _accuracies(base))
    for name in missing:
        changes = CHANGES[name]
        _streamppo("fork", str(base), "--at", "0", "--name", name, "--runs", str(folder), "--set", *changes)
        fork = folder / name
        _streamppo("resume", str(fork))
        forked = values(metrics_file.updates(fork), _accuracies(fork))
        replayed = _replayed(base, changes)
        campaign.add({"change": name, "seed": seed, "run": before, "fork": forked, "replay": replayed})
        print(json.dumps({"change": name, "seed": seed}), flush=True)
        shutil.rmtree(fork)


def _replayed(base: Path, changes: Sequence[str]) -> Values:
    """The numbers of every update made again with `changes`, by a bisection that finds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        test, out = Path(folder) / "look.py", Path(folder) / "out.jsonl"
        test.write_text(LOOK.format(horizons=HORIZONS[2:], out=out, config=base / "config.toml"))
        _streamppo("bisect", str(base), "--test", str(test), "--set", *changes)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    return values(lines, {line["update"]: line["accuracy"] for line in lines if "accuracy" in line})


LOOK = """
import contextlib, io, json
from pathlib import Path

from streamppo.commands.models.eval import evaluate
from streamppo.config import file


def test(version, metrics, model):
    line = {{"update": version, **metrics}}
    if version in {horizons}:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            evaluate(str(model), None, file.load(Path("{config}")), version=None, samples=0, as_json=True)
        line["accuracy"] = json.loads(printed.getvalue())["accuracy"]["mean"]
    with open("{out}", "a") as lines:
        lines.write(json.dumps(line) + "\\n")
    return False
"""


def _streamppo(*arguments: str) -> None:
    command = [sys.executable, "-m", "streamppo", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    if process.returncode:
        said = f"{process.stdout[-2000:]}{process.stderr[-2000:]}"
        sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{said}")


def _accuracies(run: Path) -> dict[int, float]:
    lines = [line for line in metrics_file.read(run) if "evaluation" in line]
    return {line["evaluation"]: float(right) for line in lines if (right := line["accuracy"]) is not None}


def values(updates: Sequence[Mapping[str, Any]], accuracies: Mapping[int, float]) -> Values:
    """Each metric at each horizon."""
    lines = {line["update"]: line for line in updates}
    found: Values = {"accuracy": [accuracies.get(horizon) for horizon in HORIZONS]}
    for name in METRICS[1:]:
        windows = [range(horizon // 2 + 1, horizon + 1) for horizon in HORIZONS]
        numbers = [[lines[one][name] for one in window if name in lines.get(one, {})] for window in windows]
        found[name] = [statistics.fmean(some) if some else None for some in numbers]
    return found


def verdict(differences: Sequence[float]) -> int:
    """-1 or 1 for a mean that is more than two standard errors from 0, else 0.

    Example: 0.02, 0.03 and 0.04 have a mean of 0.03 with an error of 0.0058: 1.
    """
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return 0 if abs(mean) <= 2 * error else 1 if mean > 0 else -1


def summed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each metric and horizon: the changes at which the fork has a verdict, and what the replay says of them."""
    found: list[dict[str, Any]] = []
    for name in METRICS:
        for place, horizon in enumerate(HORIZONS):
            counted = {"agrees": 0, "silent": 0, "opposite": 0}
            wrong: list[str] = []
            for change in CHANGES:
                some = [row for row in rows if row["change"] == change]
                both = [verdict(one) for kind in ("fork", "replay") if (one := _differences(some, kind, name, place))]
                if len(both) < 2 or not both[0]:
                    continue
                said = "agrees" if both[0] == both[1] else "opposite" if both[1] else "silent"
                counted[said] += 1
                wrong += [change] if said == "opposite" else []
            found.append({"metric": name, "horizon": horizon, **counted, "wrong": " ".join(wrong)})
    return found


def _differences(rows: Sequence[Row], kind: str, name: str, place: int) -> list[float]:
    pairs = [(row[kind][name][place], row["run"][name][place]) for row in rows]
    return [one - other for one, other in pairs if one is not None and other is not None]


def horizons(summary: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The largest horizon of each metric up to which the verdicts agree; 0 if there is none."""
    reach: dict[str, int] = {}
    for name in METRICS:
        reach[name] = 0
        for line in summary:
            total = line["agrees"] + line["silent"] + line["opposite"]
            if line["metric"] != name or not total:
                continue
            if line["agrees"] < AGREES * total or line["opposite"] > OPPOSITE * total:
                break
            reach[name] = line["horizon"]
    return reach


if __name__ == "__main__":
    main()
