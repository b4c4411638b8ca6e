"""Throughput with completions of equal and of heavy-tailed lengths, by lag bound and `queue.too_old`.

    python benchmarks/learning/tails.py --json tails.json --plot tails.png [--only pareto] [--max-lag 0 4]
        [--too-old mask]

Every case is a real run of configs/math.toml; its first `WARM` updates are left out. All runs have the same model; a
completion ends at a random length that depends on its identity (benchmarks/lib/lengths.py). With a lag bound of 0 no
token is too old, so one run stands for all values of `too_old`. The cases with goals come first, `--repeat` times; then
the other lag bounds, then the other values of `too_old`. Every run is appended to tails.jsonl when it ends: the same
command continues after the stored runs.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib import lengths, plots
from benchmarks.lib.campaign import Campaign, Row
from benchmarks.lib.runs import Goal, Run, machine, run, table, told

CONFIG = Path("configs/math.toml")
WARM = 15
"""The first updates, which are left out: processes warm up and lags grow."""
SAMPLES = 4
"""queue.samples_per_prompt of configs/math.toml."""
MAX_LAGS = (0, 1, 2, 4, 8, 16)
SEGMENTS = "segments"
TOO_OLD = ("mask", "drop", "wait", "windowed", SEGMENTS)
"""The first is the value in configs/math.toml: it has the goals, and stands for all at a lag bound of 0. The last
trains on segments of unfinished completions, and few tokens grow too old; its batches count segments, not completions.
"""
HEAVY = ("lognormal", "pareto")
JUDGED = 4
"""The lag bound of the goals."""
FASTER = {
    "equal": Goal("equal: trained tokens/s at max_lag 4 over max_lag 0", least=1.8),
    **{shape: Goal(f"{shape}: trained tokens/s at max_lag 4 over max_lag 0", least=2.8) for shape in HEAVY},
}
BUSY = {shape: Goal(f"{shape}: idle share of the learner at max_lag 4", most=0.05) for shape in lengths.SHAPES}


class Case(NamedTuple):
    """One run. `round` counts the repetitions of a case from 1."""

    lengths: str
    max_lag: int
    too_old: str
    round: int = 1


def main() -> None:
    """Measure the chosen cases; print a table and the verdicts, and write them with the machine's description."""
    options = _options()
    about, campaign = machine(), Campaign(options.json)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        _, model = lengths.make_models(CONFIG, Path(folder))
        for case in cases(options.only, options.max_lag, options.too_old, options.repeat):
            key = {**case._asdict(), "updates": options.updates}
            rows.append(campaign.row(key, partial(_run, model, case, options)))
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                result = {"machine": about, "updates": options.updates, "goals": judge(rows), "runs": rows}
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows), *map(told, judge(rows)), sep="\n")
    if options.plot:
        _plot(rows, options.plot)


def cases(shapes: Sequence[str], max_lags: Sequence[int], too_old: Sequence[str], repeat: int) -> list[Case]:
    """List the cases, the most important first; with a lag bound of 0 there is one value of `too_old`."""
    judged = [
        Case(shape, max_lag, TOO_OLD[0], number)
        for number in range(1, repeat + 1)
        for shape in shapes
        for max_lag in (0, JUDGED)
        if max_lag in max_lags and (max_lag == 0 or TOO_OLD[0] in too_old)
    ]
    every = (Case(shape, lag, treatment) for treatment in too_old for lag in max_lags if lag for shape in shapes)
    return [*judged, *(case for case in every if case not in judged)]


def _run(model: Path, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    return measure(run(CONFIG, overrides(model, case, options.updates)), case.lengths)


def overrides(model: Path, case: Case, updates: int) -> list[str]:
    """Return the overrides of configs/math.toml for one case."""
    return [
        f"model.path={model}",
        *lengths.overrides(case.lengths),
        f"queue.max_lag={case.max_lag}",
        "queue.ahead=max_lag",
        *(
            ["queue.too_old=mask", "queue.segments={}"]
            if case.too_old == SEGMENTS
            else [f"queue.too_old={case.too_old}"]
        ),
        f"updates={updates}",
        "evaluation={every=0, prompts=8}",
        "checkpoint.every=0",
    ]


def measure(done: Run, shape: str) -> dict[str, Any]:
    """Return the measurements of one run without its first updates; lags and drops are of the whole run.

    `length_share` is the mean length of trained completions over the mean length drawn for the same prompts. With
    segments it is trained tokens over all tokens of batches and of dropped trajectories.
    """
    steady, summary = done.updates[WARM:], done.summary
    seconds = steady[-1]["wall_s"] - done.updates[WARM - 1]["wall_s"]
    batch = summary["trajectories"] // summary["updates"]
    trained = sum(row["tokens_trained"] for row in steady)
    tokens, too_old = (sum(row[name] for row in steady) for name in ("tokens", "tokens_too_old"))
    share = trained / (batch * len(steady)) / mean_drawn(shape, summary["trajectories"])
    if any("segments_cut" in row for row in steady):
        share = trained / (tokens + summary["tokens"]["too_old"])
    lag = summary["trained_lag"]
    return {
        "samples_per_s": batch * len(steady) / seconds,
        "trained_tokens_per_s": trained / seconds,
        "learner_idle_share": sum(row["wait_s"] for row in steady) / sum(row["update_s"] for row in steady),
        "engine_idle_share": summary["engines"]["idle_share"],
        "lag_mean": lag["mean"],
        "lag_p99": lag["p99"],
        "lag_max": lag["max"],
        "masked_share": too_old / tokens,
        "dropped": summary["dropped"]["too_old"],
        "dropped_tokens": summary["dropped"]["too_old"] * summary["mean_tokens"]["dropped"],
        "length_share": share,
        "segments_cut": statistics.fmean(row.get("segments_cut", 0.0) for row in steady),
        "seconds": seconds,
    }


def mean_drawn(shape: str, trajectories: int) -> float:
    """Return the mean length drawn for the first `trajectories` trajectories of a run, each at its first attempt."""
    return statistics.fmean(lengths.draw(shape, *divmod(number, SAMPLES)) for number in range(trajectories))


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdict on every goal. Speeds are compared within a round, whose runs are close in time."""
    verdicts: list[dict[str, Any]] = []
    for shape in lengths.SHAPES:
        of_shape = [row for row in rows if row["lengths"] == shape and row["too_old"] == TOO_OLD[0]]
        at_0, at_4 = ({row["round"]: row for row in of_shape if row["max_lag"] == lag} for lag in (0, JUDGED))
        both = [(at_4[number], at_0[number]) for number in at_4 if number in at_0]
        faster = (one["trained_tokens_per_s"] / other["trained_tokens_per_s"] for one, other in both)
        verdicts.append(FASTER[shape].verdict(*faster))
        verdicts.append(BUSY[shape].verdict(*(row["learner_idle_share"] for row in at_4.values())))
    return verdicts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(lengths.SHAPES), default=list(lengths.SHAPES))
    parser.add_argument("--max-lag", type=int, nargs="+", default=MAX_LAGS)
    parser.add_argument("--too-old", nargs="+", choices=TOO_OLD, default=TOO_OLD)
    parser.add_argument("--updates", type=int, default=45)
    parser.add_argument("--repeat", type=int, default=2, help="rounds of the cases that have goals")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def _plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    for axis, shape, of_shape in plots.by_lengths(path, rows):
        for too_old in dict.fromkeys(row["too_old"] for row in of_shape):
            line = [row for row in of_shape if row["too_old"] == too_old or not row["max_lag"]]
            lags = sorted({row["max_lag"] for row in line})
            speeds = [[row["trained_tokens_per_s"] for row in line if row["max_lag"] == lag] for lag in lags]
            axis.plot(lags, [statistics.median(found) for found in speeds], "o-", label=too_old)
        axis.set(title=f"{shape} lengths", xlabel="max_lag", ylabel="trained tokens/s", ylim=(0, None))
        axis.legend(title="too_old")


if __name__ == "__main__":
    main()
