"""How right `streamppo plan` is: real runs of drawn configurations, beside what it predicts for each without seeing it.

    python benchmarks/cost/plan.py run runs-of-plan             12 runs that are measured, and 20 drawn ones
    python benchmarks/cost/plan.py compare runs-of-plan --json plan.json

Drawn are lengths (natural, equal, lognormal, Pareto), the reward's latency, rollout actors, ranks, batch, slots,
trajectories in flight, max_lag and evaluations. Each run is stopped `SECONDS` after its first update. The goals were
set before the first run.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import lengths
from benchmarks.lib.latency import LATENCY
from benchmarks.lib.runs import Goal, ended, machine, table, told
from streamppo.commands.plan import measured, plan, proposals
from streamppo.commands.plan.simulation import skipped
from streamppo.config import file as configfile
from streamppo.queue.rules.state import queue_settings
from streamppo.telemetry import metrics_file as lines

CONFIG = Path(__file__).parents[2] / "configs" / "math.toml"
SEED, DRAWN = 20, 20
"""The seed of the draw, and the number of drawn runs."""
SECONDS, LONGEST_S, PATIENCE_S = 40.0, 180.0, 90.0
"""How long a run goes on after its first update, which must come within `PATIENCE_S`: until `LEAST` updates count."""
LEAST = 15
NEAR = 0.15
GOALS = {
    "updates/s": Goal("share of configurations with updates/s within 15 %", least=1.0),
    "lag": Goal("share of configurations with a mean lag within 15 %, or 0.15 versions", least=1.0),
}
Case = dict[str, Any]
MEASURED: dict[str, Case] = {
    f"measured-{shape}-{size}": {"lengths": shape, "latency_s": 0.0} | case
    for shape in lengths.SHAPES | {"natural": None}
    for size, case in {
        "small": {"actors": 1, "ranks": 1, "batch": 128, "slots": 64},
        "large": {"actors": 2, "ranks": 1, "batch": 512, "slots": 256},
        "ranks": {"actors": 1, "ranks": 2, "batch": 256, "slots": 128},
    }.items()
}
"""Runs for each kind of lengths: two sizes tell costs by the call from costs by the row, and one has two ranks."""
REST = {"in_flight": 1.5, "max_lag": 2, "evaluation": 0}


def drawn(seed: int, count: int) -> dict[str, Case]:
    """The drawn cases, always the same for a seed."""
    source = random.Random(seed)
    return {
        f"drawn-{number:02d}": {
            "lengths": source.choice(["natural", "equal", "lognormal", "pareto"]),
            "latency_s": source.choice([0.0, 0.2, 0.5, 1.0, 2.0]),
            "actors": source.choice([1, 2, 3]),
            "ranks": source.choice([1, 2]),
            "batch": source.choice([128, 256, 512]),
            "slots": source.choice([64, 128, 256, 512]),
            "in_flight": source.choice([1.0, 1.5, 2.0]),
            "max_lag": source.choice([1, 2, 4, 8]),
            "evaluation": source.choice([0, 20]),
        }
        for number in range(count)
    }


def overrides(case: Case, models: Path) -> list[str]:
    """The overrides of CONFIG for a case."""
    case = REST | case
    in_flight = round(case["in_flight"] * case["slots"])
    natural = case["lengths"] == "natural"
    limits = [f"rollout.max_tokens={lengths.LONGEST}", f"rollout.limit=benchmarks.lib.lengths:{case['lengths']}"]
    return [
        f"model.path={models / ('model' if natural else 'endless')}",
        *([] if natural else limits),
        f"rollout.actors={case['actors']}",
        f"rollout.slots={case['slots']}",
        f"rollout.in_flight={in_flight}",
        f"learner.ranks={case['ranks']}",
        f"queue.batch_size={case['batch']}",
        f"queue.max_lag={case['max_lag']}",
        "queue.ahead=max_lag",
        f"evaluation.every={case['evaluation']}",
        "reward.function=benchmarks.lib.latency:score_any_length",
        "reward.where=actor",
        f"reward.concurrency={2 * in_flight}",
        "checkpoint.every=0",
        "updates=100000",
    ]


def make_runs(folder: Path, cases: dict[str, Case]) -> None:
    """Make the measured runs and those of `cases` that `folder` does not have yet, one after the other."""
    folder.mkdir(exist_ok=True)
    models = folder / "models"
    if not models.exists():
        models.mkdir()
        lengths.make_models(CONFIG, models)
    for name, case in (MEASURED | cases).items():
        if not (folder / name).exists():
            _run(folder, name, case, models)


def _run(folder: Path, name: str, case: Case, models: Path) -> None:
    command = [sys.executable, "-m", "streamppo", "run", str(CONFIG), "--runs", str(folder), f"name={name}"]
    log, metrics = folder / f"{name}.log", folder / name / lines.METRICS
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *overrides(case, models)],
            env={**os.environ, LATENCY: str(case["latency_s"])},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        began = time.monotonic()
        with ended(process):
            while not (metrics.exists() and b'"update"' in metrics.read_bytes()):
                if process.poll() is not None or time.monotonic() - began > PATIENCE_S:
                    sys.exit(f"{name} made no update: {log}")
                time.sleep(0.5)
            time.sleep(SECONDS)
            wanted = skipped(queue_settings(configfile.load(folder / name / configfile.CONFIG))) + LEAST
            while len(lines.updates(folder / name)) < wanted and time.monotonic() - began < LONGEST_S:
                time.sleep(1.0)
    print(name, json.dumps(case), len(lines.updates(folder / name)), "updates", flush=True)


def compare(folder: Path, cases: dict[str, Case]) -> dict[str, Any]:
    """Predict every run of `cases` in `folder` from the measured runs of its lengths, and compare."""
    rows = list[Case]()
    for name, case in cases.items():
        runs = [folder / measured_name for measured_name, one in MEASURED.items() if one["lengths"] == case["lengths"]]
        config = configfile.load(folder / name / configfile.CONFIG)
        basis = plan.basis([measured.read(run) for run in runs], plan.Assumed(reward_s=case["latency_s"]))
        predicted, did = proposals.predict(config, basis, plan.COMPARED), plan.realised(folder / name)
        rows.append(
            {
                "run": name,
                **case,
                "updates/s": did.updates_per_s,
                "predicted": predicted.updates_per_s,
                "ratio": predicted.updates_per_s / did.updates_per_s,
                "lag": did.lag_mean,
                "predicted lag": predicted.lag_mean,
                "waits": did.learner_waits,
                "predicted waits": predicted.learner_waits,
            }
        )
    right = {
        "updates/s": sum(abs(row["ratio"] - 1) <= NEAR for row in rows),
        "lag": sum(abs(row["predicted lag"] - row["lag"]) <= max(NEAR, NEAR * row["lag"]) for row in rows),
    }
    verdicts = [goal.verdict(right[name] / len(rows)) for name, goal in GOALS.items()]
    return {"machine": machine(), "rows": rows, "verdicts": verdicts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("run", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--drawn", type=int, default=DRAWN)
    options = parser.parse_args()
    cases = drawn(options.seed, options.drawn)
    if options.do == "run":
        make_runs(options.folder, cases)
        return
    result = compare(options.folder, cases)
    print(table(result["rows"]))
    print("\n".join(map(told, result["verdicts"])))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
