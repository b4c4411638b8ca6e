"""The default job with several seeds: accuracy before and after, time, lag, memory.

python benchmarks/learning/seeds.py --seeds 1 2 3 4 5 --json out.json [--set queue.max_lag=0]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import Run, machine, run

CONFIG = Path("configs/math.toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", nargs="*", default=[], metavar="section.field=value")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        rows.append(_measure(seed, run(CONFIG, [*options.set, f"seed={seed}"])))
        if len(rows) == 1:
            print("  ".join(rows[0]))
        print(
            "  ".join(f"{-1 if value is None else value:{len(name)}.4g}" for name, value in rows[-1].items()),
            flush=True,
        )
    if options.json:
        result = {"machine": machine(), "config": str(CONFIG), "overrides": options.set, "seeds": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def _measure(seed: int, done: Run) -> dict[str, Any]:
    summary = done.summary
    return {
        "seed": seed,
        "start": summary["eval_accuracy"]["start"],
        "final": summary["eval_accuracy"]["final"],
        "reached": _reached(done, 0.9),
        "wall_s": summary["wall_s"],
        "first_output_s": done.first_output_s,
        "first_update_s": summary["first_update_s"],
        "mean_lag": summary["lag"]["mean"],
        "max_lag": summary["lag"]["max"],
        "learner_idle_share": summary["learner_idle_share"],
        "engine_idle_share": summary["engines"]["idle_share"],
        "peak_memory_mib": done.peak_memory_mib,
    }


def _reached(done: Run, target: float) -> int | None:
    """The version of the first evaluation with at least the accuracy `target`."""
    return next((line["evaluation"] for line in done.evaluations if (line["accuracy"] or 0.0) >= target), None)


if __name__ == "__main__":
    main()
