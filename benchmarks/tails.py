"""Throughput with completions of equal and of heavy-tailed lengths, by lag bound and treatment of tokens too old.

    python benchmarks/tails.py --json tails.json --plot tails.png [--only pareto] [--max-lag 0 4] [--too-old mask]

Every case is a real run of configs/math.toml, of which the first `WARM` updates are left out. The model is the same in
all of them; a completion ends at a length drawn from its identity (benchmarks/lengths.py). With a lag bound of 0
nothing is ever too old, so that its one run counts for every treatment. The plot needs matplotlib (`streamppo[plots]`).
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import lengths
from benchmarks.runs import Goal, Run, machine, run, table, told

CONFIG = Path("configs/math.toml")
WARM = 15
"""Updates left out, in which all processes warm up and lags grow."""
SAMPLES = 4
"""queue.samples_per_prompt of configs/math.toml."""
MAX_LAGS = (0, 1, 2, 4, 8, 16)
TOO_OLD = ("mask", "drop", "wait")
HEAVY = ("lognormal", "pareto")
JUDGED = 4
"""The lag bound that the goals speak of; `too_old` is that of configs/math.toml."""
FASTER = {
    "equal": Goal("equal: trained tokens/s at max_lag 4 over max_lag 0", least=1.8),
    **{shape: Goal(f"{shape}: trained tokens/s at max_lag 4 over max_lag 0", least=2.8) for shape in HEAVY},
}
BUSY = {shape: Goal(f"{shape}: idle share of the learner at max_lag 4", most=0.05) for shape in lengths.SHAPES}


def main() -> None:
    """Measure the chosen cases, print a table and the verdicts, and write them down with the machine."""
    options = _options()
    about = machine()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        _, model = lengths.make_models(CONFIG, Path(folder))
        for shape, max_lag, too_old in cases(options.only, options.max_lag, options.too_old):
            made = run(CONFIG, overrides(model, shape, max_lag, too_old, options.updates))
            rows.append({"lengths": shape, "max_lag": max_lag, "too_old": too_old, **measure(made, shape)})
            print(table(rows[-1:]).splitlines()[len(rows) > 1 and -1 :], flush=True)
    verdicts = judge(rows)
    print(table(rows), *map(told, verdicts), sep="\n")
    result = {"machine": about, "updates": options.updates, "goals": verdicts, "runs": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        _plot(rows, options.plot)


def cases(shapes: Sequence[str], max_lags: Sequence[int], too_old: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Every shape of lengths with every lag bound and treatment; with a lag bound of 0 only the first treatment."""
    for shape, max_lag, treatment in product(shapes, max_lags, too_old):
        if max_lag or treatment == too_old[0]:
            yield shape, max_lag, treatment


def overrides(model: Path, shape: str, max_lag: int, too_old: str, updates: int) -> list[str]:
    """Return all that differs from configs/math.toml in one case."""
    return [
        f"model.path={model}",
        *lengths.overrides(shape),
        f"queue.max_lag={max_lag}",
        f"queue.too_old={too_old}",
        f"updates={updates}",
        "evaluation={every=0, prompts=8}",
        "checkpoint.every=0",
    ]


def measure(done: Run, shape: str) -> dict[str, Any]:
    """Return the numbers of one run, after its first updates; lags and drops are of all of it.

    `length_share` is the mean length of what was trained on over the mean of what the same prompts were to be.
    """
    steady, summary = done.updates[WARM:], done.summary
    seconds = steady[-1]["wall_s"] - done.updates[WARM - 1]["wall_s"]
    batch = summary["trajectories"] // summary["updates"]
    trained = sum(row["tokens_trained"] for row in steady)
    tokens, too_old = (sum(row[name] for row in steady) for name in ("tokens", "tokens_too_old"))
    mean_length = mean_drawn(shape, summary["trajectories"])
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
        "length_share": trained / (batch * len(steady)) / mean_length,
        "seconds": seconds,
    }


def mean_drawn(shape: str, trajectories: int) -> float:
    """Return the mean length of the first trajectories that a run asks for, each at its first attempt."""
    return statistics.fmean(lengths.draw(shape, *divmod(number, SAMPLES)) for number in range(trajectories))


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdict on every goal."""
    found = {(row["lengths"], row["max_lag"]): row for row in rows if row["too_old"] == "mask" or not row["max_lag"]}
    verdicts: list[dict[str, Any]] = []
    for shape in lengths.SHAPES:
        at_0, at_4 = found.get((shape, 0)), found.get((shape, JUDGED))
        faster = at_4["trained_tokens_per_s"] / at_0["trained_tokens_per_s"] if at_0 and at_4 else None
        verdicts.append(FASTER[shape].verdict(faster))
        verdicts.append(BUSY[shape].verdict(at_4["learner_idle_share"] if at_4 else None))
    return verdicts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(lengths.SHAPES), default=list(lengths.SHAPES))
    parser.add_argument("--max-lag", type=int, nargs="+", default=MAX_LAGS)
    parser.add_argument("--too-old", nargs="+", choices=TOO_OLD, default=TOO_OLD)
    parser.add_argument("--updates", type=int, default=45)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def _plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row["lengths"] for row in rows))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        of_shape = [row for row in rows if row["lengths"] == shape]
        synchronous = [row for row in of_shape if row["max_lag"] == 0]
        for too_old in dict.fromkeys(row["too_old"] for row in of_shape):
            line = [*synchronous, *(row for row in of_shape if row["too_old"] == too_old and row["max_lag"])]
            axis.plot(
                [row["max_lag"] for row in line], [row["trained_tokens_per_s"] for row in line], "o-", label=too_old
            )
        axis.set(title=f"{shape} lengths", xlabel="max_lag", ylabel="trained tokens/s", ylim=(0, None))
        axis.legend(title="too_old")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
