"""Segments against rules for whole completions: how soon a policy is good, and what is lost, with heavy-tailed answers.

    python benchmarks/staleness.py --json staleness.json --plot staleness.png [--only pareto] [--max-lag 2 4]

Every case is a real run on the task of ciphers.py, all of a seed from the same model. `sync` is `max_lag = 0`; `mask`,
`drop` and `wait` are `queue.too_old` for whole completions; `segments` trains on what is not finished. A batch is a
fixed number of trajectories in all of them. Goals were written down before the first run. Every run is a line of
staleness.jsonl as soon as it has ended: the same command goes on after those that are there, seed by seed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ciphers, plots
from benchmarks.campaign import Campaign, Row
from benchmarks.runs import Goal, Run, machine, run, table, told

CONFIG = Path(__file__).parent / "ciphers.toml"
SHAPES = ("pareto", "lognormal")
MAX_LAGS = (2, 4, 16)
SYNC, SEGMENTS = "sync", "segments"
WHOLE = ("mask", "drop", "wait")
TARGET = 0.9
"""The held-out accuracy whose time is compared."""
JUDGED = 4
"""The lag bound of the goals of speed."""
GOALS = {
    "sync": Goal("segments: time to accuracy, synchronous over segments", least=2.8),
    "whole": Goal("segments: time to accuracy, best rule for whole completions over segments", least=1.3),
    "accuracy": Goal("segments: final accuracy over synchronous", least=0.98),
    "bias": Goal("segments: share of sampled tokens that were dropped or masked", most=0.0),
    "lag": Goal("segments: greatest lag over the bound", most=1.0),
    "idle": Goal("segments: idle share of the learner", most=0.05),
}


class Case(NamedTuple):
    """One run."""

    lengths: str
    rule: str
    max_lag: int
    seed: int


def main() -> None:
    """Measure the chosen cases, print a table and the verdicts, and write them down with the machine."""
    options = _options()
    about, campaign = machine(), Campaign(options.json)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(options.only, options.max_lag, options.seeds):
            key = {**case._asdict(), "updates": options.updates}
            rows.append(campaign.row(key, partial(_run, case, options.updates, Path(folder))))
            print(json.dumps({name: value for name, value in rows[-1].items() if name != "accuracies"}), flush=True)
            if options.json:
                result = {"machine": about, "goals": judge(rows), "runs": rows}
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    shown = [{name: value for name, value in row.items() if name != "accuracies"} for row in rows]
    print(table(shown), *map(told, judge(rows)), sep="\n")
    if options.plot:
        _plot(rows, options.plot)


def cases(shapes: Sequence[str], max_lags: Sequence[int], seeds: Sequence[int]) -> Iterator[Case]:
    """List the cases, seed by seed; with a lag bound of 0 there is one."""
    for seed in seeds:
        for shape in shapes:
            yield Case(shape, SYNC, 0, seed)
            yield from (Case(shape, rule, lag, seed) for lag in max_lags for rule in (SEGMENTS, *WHOLE))


def overrides(case: Case, data: Path, model: Path, updates: int) -> list[str]:
    """Return all that differs from ciphers.toml in one case."""
    too_old = "mask" if case.rule in (SYNC, SEGMENTS) else case.rule
    return [
        f"seed={case.seed}",
        f"updates={updates}",
        f"model.path={model}",
        f"task.data={data / 'train.jsonl'}",
        f"task.evaluation={data / 'held_out.jsonl'}",
        f"queue.max_lag={case.max_lag}",
        f"queue.too_old={too_old}",
        *(["queue.segments={}"] if case.rule == SEGMENTS else []),
    ]


def measure(done: Run) -> dict[str, Any]:
    """Return the numbers of one run; its clock begins with the first update."""
    summary, updates = done.summary, done.updates
    begin = updates[0]["wall_s"]
    seconds = {row["update"]: row["wall_s"] - begin for row in updates}
    accuracies = [(version, seconds.get(version, 0.0), found) for version, found in summary["evaluations"]]
    tokens = summary["tokens"]
    masked, dropped = sum(row["tokens_too_old"] for row in updates), tokens["too_old"]
    trained = sum(row["tokens_trained"] for row in updates)
    return {
        "accuracy": summary["eval_accuracy"]["final"],
        "seconds": seconds[updates[-1]["update"]],
        "to_target_s": next((at for _, at, found in accuracies if found is not None and found >= TARGET), None),
        "lag_mean": summary["trained_lag"]["mean"],
        "lag_max": summary["trained_lag"]["max"],
        "lost_share": (masked + dropped) / max(1.0, trained + masked + dropped),
        "learner_idle_share": summary["learner_idle_share"],
        "engine_idle_share": summary["engines"]["idle_share"],
        "trained_tokens_per_s": trained / seconds[updates[-1]["update"]],
        "segments_cut": statistics.fmean(row.get("segments_cut", 0.0) for row in updates),
        "ess": statistics.fmean(row["ess"] for row in updates),
        "accuracies": accuracies,
    }


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdict on every goal, for each shape of lengths. Times are compared within a seed."""
    verdicts: list[dict[str, Any]] = []
    for shape in dict.fromkeys(row["lengths"] for row in rows):
        of_shape = [row for row in rows if row["lengths"] == shape]
        cut = [row for row in of_shape if row["rule"] == SEGMENTS]
        found: dict[str, list[float]] = {
            "sync": [*_times(of_shape, (SYNC,))],
            "whole": [*_times(of_shape, WHOLE)],
            "accuracy": [row["accuracy"] / sync["accuracy"] for row, sync in _with_sync(of_shape, cut)],
            # Of bounds the worst run counts.
            "bias": [max(row["lost_share"] for row in cut)] if cut else [],
            "lag": [max(row["lag_max"] / row["max_lag"] for row in cut)] if cut else [],
            "idle": [row["learner_idle_share"] for row in cut if row["max_lag"] == JUDGED],
        }
        verdicts += [{**GOALS[name].verdict(*values), "lengths": shape} for name, values in found.items()]
    return verdicts


def _times(rows: Sequence[Mapping[str, Any]], rules: Sequence[str]) -> Iterator[float]:
    """For each seed, the least time of `rules` over that of segments, where both came to the target."""
    for seed in sorted({row["seed"] for row in rows}):
        of_seed = [row for row in rows if row["seed"] == seed and row["to_target_s"] is not None]
        ours = [row["to_target_s"] for row in of_seed if row["rule"] == SEGMENTS and row["max_lag"] == JUDGED]
        theirs = [row["to_target_s"] for row in of_seed if row["rule"] in rules]
        if ours and theirs:
            yield min(theirs) / ours[0]


def _with_sync(
    rows: Sequence[Mapping[str, Any]], cut: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    synchronous = {row["seed"]: row for row in rows if row["rule"] == SYNC}
    return ((row, synchronous[row["seed"]]) for row in cut if row["seed"] in synchronous)


def _run(case: Case, updates: int, folder: Path) -> dict[str, Any]:
    data, model = folder / case.lengths, folder / f"model-{case.lengths}-{case.seed}"
    if not data.is_dir():
        ciphers.write(data, case.lengths)
    if not model.is_dir():
        _make_model(case, data, model)
    return measure(run(CONFIG, overrides(case, data, model, updates)))


def _make_model(case: Case, data: Path, model: Path) -> None:
    """Make the warm-started model of all runs of a seed and a shape."""
    from streamppo.config import file as configfile
    from streamppo.learner import tiny

    files = [f"task.data={data / 'train.jsonl'}", f"task.evaluation={data / 'held_out.jsonl'}"]
    tiny.make(configfile.load(CONFIG, [f"seed={case.seed}", *files]), model)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--max-lag", type=int, nargs="+", default=MAX_LAGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def _plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw held-out accuracy over time, one line for each rule, all seeds, at the lag bound of the goals."""
    for axis, shape, of_shape in plots.by_lengths(path, rows):
        judged = [row for row in of_shape if row["max_lag"] in (0, JUDGED)]
        for number, rule in enumerate(dict.fromkeys(row["rule"] for row in judged)):
            for place, row in enumerate(row for row in judged if row["rule"] == rule):
                _, times, found = zip(*row["accuracies"], strict=True)
                axis.plot(times, found, color=f"C{number}", label=None if place else rule)
        axis.set(title=f"{shape} lengths, max_lag {JUDGED}", xlabel="seconds", ylabel="held-out accuracy")
        axis.legend()


if __name__ == "__main__":
    main()
