"""Throughput of the whole system at several lag bounds and reward latencies; and the engine compared with its peer.

    python benchmarks/cost/throughput.py --json out.json --max-lag 0 1 4 --reward-latency-s 0 1

Every setting is a real run of `--config` for `--updates` updates; the first `WARM_UP` do not count. All runs have the
same async reward, in its own process like a user's reward: runs of one lag bound differ only in its latency, and only
`max_lag` bounds the number of trajectories in flight. The engine's peer is transformers' batched `generate` on the same
weights, one thread, alternating in one process.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.latency import LATENCY
from benchmarks.lib.runs import machine, run, waiting

WARM_UP = 5


def main() -> None:
    options = parser().parse_args()
    rows = [
        _run(options, max_lag, latency_s) for max_lag, latency_s in product(options.max_lag, options.reward_latency_s)
    ]
    result = {"machine": machine(), "config": str(options.config), "overrides": options.set, "settings": rows}
    if options.peer:
        from benchmarks.cost import engine

        result["engine"] = engine.measure()
    _print(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def parser() -> argparse.ArgumentParser:
    """The command's argument parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/math.toml"))
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--max-lag", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--reward-latency-s", type=float, nargs="+", default=[0.0])
    parser.add_argument("--engine", default="embedded", help="rollout.engine.kind")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--in-flight", type=int, default=8192)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.field=value")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave transformers' generate out")
    return parser


def overrides(options: argparse.Namespace, max_lag: int) -> list[str]:
    """The overrides of `--config` in the runs of one `max_lag`, for any reward latency."""
    return [
        f"queue.max_lag={max_lag}",
        "queue.ahead=max_lag",
        f"rollout.engine.kind={options.engine}",
        f"updates={options.updates}",
        *waiting(options.in_flight),
        *options.set,
    ]


def _run(options: argparse.Namespace, max_lag: int, latency_s: float) -> dict[str, Any]:
    done = run(options.config, overrides(options, max_lag), {LATENCY: str(latency_s)})
    return _measure(done.updates, done.summary, max_lag, latency_s)


def _measure(
    updates: Sequence[Mapping[str, Any]], summary: dict[str, Any], max_lag: int, latency_s: float
) -> dict[str, Any]:
    steady, engines = updates[WARM_UP:], summary["engines"]
    seconds = steady[-1]["wall_s"] - updates[WARM_UP - 1]["wall_s"]
    return {
        "max_lag": max_lag,
        "reward_latency_s": latency_s,
        "updates_per_s": len(steady) / seconds,
        "trained_tokens_per_s": sum(row["tokens_trained"] for row in steady) / seconds,
        "engine_tokens_per_s": engines["tokens"] / engines["seconds"],
        "learner_idle_share": sum(row["wait_s"] for row in steady) / sum(row["update_s"] for row in steady),
        "engine_idle_share": engines["idle_share"],
        "lag": summary["lag"],
        "dropped": summary["dropped"],
        "push_ms": summary["push_ms"],
        "swap_ms": engines["swap_ms"],
        "first_update_s": summary["first_update_s"],
    }


def _print(result: dict[str, Any]) -> None:
    columns = ["max_lag", "reward_latency_s", "updates_per_s", "trained_tokens_per_s", "engine_tokens_per_s"]
    columns += ["learner_idle_share", "engine_idle_share"]
    print("  ".join(columns) + "  lag histogram (share of tokens)")
    for row in result["settings"]:
        histogram = row["lag"]["histogram"]
        total = sum(histogram.values())
        shares = ", ".join(f"{lag}: {count / total:.2f}" for lag, count in histogram.items())
        print("  ".join(f"{row[name]:{len(name)}.4g}" for name in columns) + f"  {shares}")
    for row in result.get("engine", []):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
