"""Sampling ahead as needed (`queue.ahead`) beside always `max_lag` ahead, by the queue's rules in simulated time.

    python benchmarks/cost/ahead.py --json ahead.json [--shapes equal lognormal pareto] [--updates 200]

An update takes one second. Drawn are the lengths of completions (benchmarks/lib/lengths.py), the rate of all engines
together, in batches a second, the latency of a reward, max_lag and the number of engines. The simulation is that of
`streamppo plan`; the first max_lag + 3 updates count as start.
"""

import argparse
import json
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import lengths
from benchmarks.lib.runs import Goal, machine, table, told
from streamppo.commands.plan.simulation import simulate
from streamppo.commands.plan.workload import StageCosts, Workload
from streamppo.queue.rules.state import QueueSettings

BATCH, SLOTS, DRAWN = 64, 64, 4096
RATES, REWARDS_S, MAX_LAGS, ENGINES = (0.7, 1.2, 3.0), (0.0, 1.0, 10.0), (2, 4, 16), (1, 3)
GOALS = {
    "rate": Goal("updates/s over those with engines max_lag ahead, worst case", least=0.98),
    "lag": Goal("mean lag at max_lag 16, rewards of 0 s, engines 3 times as fast, worst case", most=4.0),
}


def case(shape: str, rate: float, reward_s: float, max_lag: int, engines: int, updates: int) -> dict[str, Any]:
    """One row: updates a second, mean lag, lost tokens and busy engines, as needed and always max_lag ahead."""
    drawn = [lengths.draw(shape, number, 0) for number in range(DRAWN)]
    step_s = SLOTS * engines / (BATCH * statistics.fmean(drawn) * rate)
    costs = StageCosts(
        step_s=step_s / 2,
        row_s=step_s / 2 / SLOTS,
        cached_s=0,
        prefill_s=step_s / 2,
        prompt_s=0,
        swap_s=0.02,
        sample_s=0,
        reward_s=reward_s,
        call_s=1e-4,
        stored_s=1e-5,
        publish_s=1e-3,
        update_s=1,
        token_s=0,
        sync_s=0,
        push_s=0.05,
    )
    row: dict[str, Any] = {"lengths": shape, "rate": rate, "reward_s": reward_s, "max_lag": max_lag, "engines": engines}
    for name, as_needed in (("full", False), ("needed", True)):
        settings = QueueSettings("t", BATCH, 1, max_lag, max_lag, False, "mask", 3, 1.0, as_needed=as_needed)
        in_flight = BATCH * (max_lag + 1)
        made = simulate(Workload(settings, engines, in_flight, SLOTS, 1, 10.0, drawn), costs, updates)
        row |= {
            f"{name} updates/s": made.updates_per_s,
            f"{name} lag": made.lag_mean,
            f"{name} lost": made.tokens_lost,
            f"{name} busy": made.engines_busy,
        }
    return row


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts on `GOALS`."""
    shares = [row["needed updates/s"] / row["full updates/s"] for row in rows]
    lags = [row["needed lag"] for row in rows if (row["max_lag"], row["reward_s"], row["rate"]) == (16, 0.0, 3.0)]
    return [GOALS["rate"].verdict(min(shares)), *([GOALS["lag"].verdict(max(lags))] if lags else [])]


def main() -> None:
    """Simulate all cases; print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=lengths.SHAPES, default=list(lengths.SHAPES))
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    grid = product(options.shapes, RATES, REWARDS_S, MAX_LAGS, ENGINES)
    rows = [case(*chosen, options.updates) for chosen in grid]
    verdicts = judge(rows)
    print(table(rows), *map(told, verdicts), sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "goals": verdicts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
