"""The cost of a slow reward: a run whose reward takes a second, compared with the same run without this latency.

    python benchmarks/cost/reward_latency.py --json out.json --latency-s 1

Both are real runs of `--config` with the same async reward, in its own process like a user's reward. A waiting reward
costs nothing if enough trajectories are in flight: by Little's law these are rate * latency in addition to the decoding
slots, and `max_lag` must allow as many. Exits with 1 if throughput falls by more than `--tolerance`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.latency import LATENCY
from benchmarks.lib.runs import machine, run, waiting

WARM_UP = 20


def main() -> None:
    options = _options()
    latencies = (0.0, options.latency_s)
    rows = [_run(options, latency_s) for _ in range(options.repeats) for latency_s in latencies]
    without, with_latency = (_best(rows, latency_s) for latency_s in latencies)
    share = with_latency / without
    result = {
        "machine": machine(),
        "config": str(options.config),
        "overrides": _overrides(options),
        "runs": rows,
        "share_of_zero_latency": share,
    }
    for row in rows:
        print(json.dumps(row))
    print(f"with a reward of {options.latency_s:g} s the run is {share:.1%} as fast as with one of 0 s")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(share < 1 - options.tolerance)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/math.toml"))
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--latency-s", type=float, default=1.0)
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turns; the best of them counts")
    parser.add_argument("--in-flight", type=int, default=8192)
    parser.add_argument("--max-lag", type=int, default=16)
    parser.add_argument("--where", default="process", choices=["process", "actor"])
    parser.add_argument("--set", nargs="*", default=[], metavar="section.field=value")
    return parser.parse_args()


def _best(rows: list[dict[str, Any]], latency_s: float) -> float:
    """The highest throughput: other work on the machine can only slow a run down."""
    return max(row["trajectories_per_s"] for row in rows if row["reward_latency_s"] == latency_s)


def _overrides(options: argparse.Namespace) -> list[str]:
    return [
        f"updates={options.updates}",
        f"queue.max_lag={options.max_lag}",
        *waiting(options.in_flight, options.where),
        *options.set,
    ]


def _run(options: argparse.Namespace, latency_s: float) -> dict[str, Any]:
    done = run(options.config, _overrides(options), {LATENCY: str(latency_s)})
    steady = done.updates[WARM_UP:]
    seconds = steady[-1]["wall_s"] - done.updates[WARM_UP - 1]["wall_s"]
    trajectories = done.summary["trajectories"] / done.summary["updates"] * len(steady)
    return {
        "reward_latency_s": latency_s,
        "trajectories_per_s": trajectories / seconds,
        "updates_per_s": len(steady) / seconds,
        "learner_idle_share": sum(row["wait_s"] for row in steady) / sum(row["update_s"] for row in steady),
        "lag": done.summary["lag"]["mean"],
        "scorers": done.summary["engines"]["scorers"],
    }


if __name__ == "__main__":
    main()
