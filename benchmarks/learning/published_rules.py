"""The rule of `init` for old data, beside its rule for small models, on a published model: SmolLM2-135M-Instruct.

    pip install gguf
    python benchmarks/learning/published_rules.py --json rules.json [--seeds 1 2 3] [--updates 40] [--folder work]

The task and the configuration are those of published_model.py, with 24 tokens per completion. Each run is one process
(benchmarks/lib/world.py): all tokens of the batch of update u are sampled by version u - lag.

    fresh      `init`'s rule for models above 20 million parameters, lag 0
    truncate   the same, lag 8
    topr       TOPR's correction, negatives at a quarter, lag 8
    small      `topr` with four minibatches and beta2 = 0.999: `init`'s rule for small models, lag 8
    full       `topr` with negatives at full weight, lag 8
    steps      `truncate` with the four minibatches and beta2 of `small`, lag 8: what the steps alone do

Before the first run it was decided: `init` changes its rule for large models if `topr`, `small` or `full` has a mean
reward over all updates that is higher than that of `truncate` by `BETTER` in the median of the seeds, and lower in
none. Every run is appended to rules.jsonl when it ends: the same command continues after the stored runs.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.learning import published_model
from benchmarks.lib import world
from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.pace import Fixed, batches, step
from benchmarks.lib.runs import machine, table
from streamppo.config import file as configfile
from streamppo.config.sections import Config

LAG = 8
MAX_TOKENS = 24
BETTER = 0.03
EVERY = 10
"""Updates between two evaluations."""
TOPR = ("algorithm.correction={kind='topr'}", "algorithm.negative_weight=0.25")
STEPS = ("learner.minibatches=4", "learner.betas=[0.9,0.999]")
RULES = {
    "fresh": (),
    "truncate": (),
    "topr": TOPR,
    "small": (*TOPR, *STEPS),
    "full": ("algorithm.correction={kind='topr'}",),
    "steps": STEPS,
}
MEANS = ("reward", "entropy", "ess", "grad_norm", "length", "truncated")


async def measure(config: Config, model: Path, lag: int) -> Mapping[str, Any]:
    """Sample, update and swap in turns, with `lag` batches ahead."""
    began = time.monotonic()
    made = await world.build(config, model, slots=64, max_total_tokens=128)
    pace = Fixed(lag)
    accuracies, found = [await world.accuracy(made)], defaultdict[str, list[float]](list)
    async for batch in batches(made, pace):
        version, metrics = batch.version, step(made, pace, batch).metrics
        for name in MEANS:
            if name in metrics:
                found[name].append(round(metrics[name], 5))
        await made.swap(version + 1)
        if (version + 1) % EVERY == 0:
            accuracies.append(await world.accuracy(made))
        print(version + 1, *(f"{name} {values[-1]:.3f}" for name, values in found.items()), flush=True)
    await made.engine.stop()
    return {"accuracies": accuracies, **found, "seconds": round(time.monotonic() - began)}


def _measured(folder: Path, rule: str, seed: int, updates: int) -> Mapping[str, Any]:
    lag = 0 if rule == "fresh" else LAG
    chosen = [
        f"seed={seed}",
        f"updates={updates}",
        f"queue.max_lag={lag}",
        f"rollout.max_tokens={MAX_TOKENS}",
        "reward.where=actor",
        "task.held_out=0.15",
        "evaluation.prompts=126",
    ]
    config = configfile.load(folder / "mine.toml", [*chosen, *RULES[rule]])
    return asyncio.run(measure(config, folder / "smollm2", lag))


def summed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line for each rule: medians over the seeds, and the worst seed."""
    lines: list[dict[str, Any]] = []
    for rule in RULES:
        some = [row for row in rows if row["rule"] == rule]
        if some:
            rewards = [statistics.fmean(row["reward"]) for row in some]
            lines.append(
                {
                    "rule": rule,
                    "seeds": len(some),
                    "mean reward": round(statistics.median(rewards), 3),
                    "worst": round(min(rewards), 3),
                    "last ten": round(statistics.median(statistics.fmean(row["reward"][-10:]) for row in some), 3),
                    "held-out": round(statistics.median(row["accuracies"][-1] for row in some), 3),
                    "entropy": round(statistics.median(statistics.fmean(row["entropy"][-10:]) for row in some), 3),
                    "ess": round(statistics.median(statistics.fmean(row["ess"]) for row in some), 3),
                }
            )
    return lines


def is_better(rows: Sequence[Row], rule: str) -> bool:
    """Apply the decision above to `rule`."""
    mean = {(row["rule"], row["seed"]): statistics.fmean(row["reward"]) for row in rows}
    seeds = [seed for name, seed in mean if name == rule and ("truncate", seed) in mean]
    gains = [mean[rule, seed] - mean["truncate", seed] for seed in seeds]
    return bool(gains) and statistics.median(gains) >= BETTER and min(gains) >= 0


def main() -> None:
    """Measure the chosen cases in this process; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="where model and rows are kept (default: a temporary folder)")
    options = parser.parse_args()
    about, campaign = machine(), Campaign(options.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        published_model.prepare(folder)
        world.alone(Path(scratch))
        for seed, rule in product(options.seeds, options.rules):
            key = {"rule": rule, "seed": seed, "updates": options.updates}
            row = campaign.row(key, partial(_measured, folder, rule, seed, options.updates))
            print(rule, seed, row["accuracies"], row["seconds"], flush=True)
        torch.distributed.destroy_process_group()
    rows = campaign.rows
    better = {rule: is_better(rows, rule) for rule in RULES if rule not in ("fresh", "truncate")}
    print(table(summed(rows)), better, sep="\n")
    result = {"machine": about, "better": better, "summary": summed(rows), "runs": rows}
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
