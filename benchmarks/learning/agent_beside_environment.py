"""One task twice: by an agent at the endpoint, and by the built-in environment with the same rules; with several seeds.

    python benchmarks/learning/agent_beside_environment.py --seeds 1 2 3 4 5 --json out.json

Both are examples/calculator_agent.toml; the second has `streamppo.tasks.library.calculator:Calculator` for its
environment. Every run is also a line of out.jsonl as soon as it has ended, and the same command goes on after those
that are there.

The curves are shares of right answers, mean over windows of `WINDOW` updates. They agree within seeds where the means
of both are no further apart than twice the standard error of their difference, window by window.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine, run, table

REPOSITORY = Path(__file__).parents[2]
AGENT = REPOSITORY / "examples" / "calculator_agent.toml"
BUILT_IN = """[environment]
name = "streamppo.tasks.library.calculator:Calculator"
max_turns = 3
max_tokens = 24

"""
ARMS = ("agent", "environment")
WINDOW = 5
"""Updates of a window."""
ERRORS = 2.0


def main() -> None:
    """Make the runs that are missing, and compare both arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", nargs="*", default=[], metavar="section.field=value")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    log = options.json.with_suffix(".jsonl") if options.json else None
    made: list[dict[str, Any]] = (
        [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    )
    with tempfile.TemporaryDirectory() as folder:
        configs = {"agent": AGENT, "environment": built_in(Path(folder))}
        for seed in options.seeds:
            for arm in ARMS:
                if any(one["arm"] == arm and one["seed"] == seed for one in made):
                    continue
                made.append(measured(arm, seed, configs[arm], options.set))
                print(json.dumps({name: value for name, value in made[-1].items() if name != "right"}), flush=True)
                if log:
                    with log.open("a") as file:
                        file.write(json.dumps(made[-1]) + "\n")
    windows = compare(made)
    print(table(windows))
    if options.json:
        found = {"machine": machine(), "overrides": options.set, "windows": windows, "runs": made}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def built_in(folder: Path) -> Path:
    """The configuration of the agent, with the built-in environment in place of it."""
    before, _, rest = AGENT.read_text().partition("[environment]\n")
    written = folder / "calculator.toml"
    written.write_text(before + BUILT_IN + rest[rest.index("[reward]") :])
    return written


def measured(arm: str, seed: int, config: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run: its curve, its accuracies and its time."""
    done = run(config, [*overrides, f"seed={seed}"], {"OMP_NUM_THREADS": "1"})
    accuracy = done.summary["eval_accuracy"]
    return {
        "arm": arm,
        "seed": seed,
        "start": accuracy["start"],
        "final": accuracy["final"],
        "wall_s": round(done.summary["wall_s"], 1),
        "tool": [line.get("reward_tool") for line in (done.updates[0], done.updates[-1])],
        "right": [round(line["reward"], 4) for line in done.updates],
    }


def compare(made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both arms window by window, over the seeds that both have."""
    curves = {arm: {one["seed"]: one["right"] for one in made if one["arm"] == arm} for arm in ARMS}
    seeds = sorted(curves["agent"].keys() & curves["environment"].keys())
    if len(seeds) < 2:
        return []
    rows = list[dict[str, Any]]()
    for first in range(0, min(len(curves[arm][seed]) for arm in ARMS for seed in seeds), WINDOW):
        means = {arm: [statistics.fmean(curves[arm][seed][first : first + WINDOW]) for seed in seeds] for arm in ARMS}
        error = (sum(statistics.variance(column) for column in means.values()) / len(seeds)) ** 0.5
        apart = abs(statistics.fmean(means["agent"]) - statistics.fmean(means["environment"]))
        rows.append(
            {
                "updates": f"{first + 1}-{first + WINDOW}",
                **{arm: round(statistics.fmean(column), 3) for arm, column in means.items()},
                "apart": round(apart, 3),
                "standard_error": round(error, 3),
                "agree": apart <= ERRORS * error,
            }
        )
    return rows


if __name__ == "__main__":
    main()
