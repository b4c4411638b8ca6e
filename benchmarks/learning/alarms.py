"""Count false alarms: signs of the diagnosis in runs whose accuracy has risen.

python benchmarks/learning/alarms.py runs/letters-1 runs/letters-2 ... [--json out.json]
python benchmarks/learning/alarms.py --play /tmp/alarms --seeds 1 2 [--only segments]
        [--json out.json]    the shipped projects
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from streamppo.config import file as configfile
from streamppo.errors import RunError
from streamppo.telemetry import diagnosis, metrics_file, progress
from streamppo.telemetry.record import read_summary
from streamppo.telemetry.summary import Summary

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = "import sys; from streamppo.cli import main; sys.exit(main(sys.argv[1:]))"
INIT = "init"
"""Stands for the project of `streamppo init`, in place of a configuration."""
MATH = "configs/math.toml"
OWN = "algorithm.{0}={{kind='function',function='examples/custom_{0}.py:{1}'}}"
PROJECTS = {
    "letters": (INIT, "updates=300"),
    "segments": (INIT, "updates=200", "queue.segments={}"),
    "synchronous": (INIT, "updates=200", "queue.max_lag=0"),
    "grpo": (INIT, "updates=200", "algorithm.advantage={kind='grpo'}"),
    "second_chance": ("examples/second_chance.toml", "updates=100"),
    "math": (MATH, "updates=300"),
    "custom_loss": (
        MATH,
        "updates=150",
        OWN.format("policy_loss", "loss").replace("custom_policy_loss", "custom_loss"),
    ),
    "custom_advantage": (MATH, "updates=150", OWN.format("advantage", "advantage")),
    "custom_correction": (MATH, "updates=150", OWN.format("correction", "weights")),
    "long": (INIT, "updates=700"),
}
"""Shipped projects that learn on a CPU, by run name: (configuration, overrides)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="folders of runs that have ended")
    parser.add_argument("--play", type=Path, metavar="FOLDER", help="make runs of the shipped projects in it")
    parser.add_argument("--only", nargs="+", choices=PROJECTS, default=list(PROJECTS), help="of these projects")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    played = _played(options.play, options.only, options.seeds) if options.play else ()
    rows: list[dict[str, Any]] = []
    for folder in chain(options.runs, played):
        rows.append(row := _signs(folder))
        print(f"{row['run']}, seed {row['seed']}: {row['verdict']}; signs: {', '.join(row['signs']) or 'none'}")
        sys.stdout.flush()
    good = [row for row in rows if row["is_better"]]
    alarms = sum(len(row["signs"]) for row in good)
    print(f"{alarms} signs in {len(good)} good runs of {len(rows)}")
    if options.json:
        options.json.write_text(json.dumps({"alarms": alarms, "runs": rows}, indent=2) + "\n")


def _played(place: Path, projects: Iterable[str], seeds: Iterable[int]) -> Iterable[Path]:
    """Make the runs one after another, and yield their folders; existing runs are kept."""
    place = place.resolve()
    for seed in seeds:
        for name in projects:
            file, *changes = PROJECTS[name]
            project, run = place / name, place / "runs" / f"{name}-{seed}"
            if file == INIT and not project.exists():
                _streamppo("init", str(project))
            config = project / "run.toml" if file == INIT else REPOSITORY / file
            if not read_summary(run):
                _streamppo("run", str(config), *changes, f"seed={seed}", f"name={run.name}", "--runs", str(run.parent))
            yield run


def _streamppo(*words: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *words], cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(f"streamppo {' '.join(words)}: exit code {done.returncode}")


def _signs(folder: Path) -> dict[str, Any]:
    config, lines = configfile.load(folder / configfile.CONFIG), metrics_file.read(folder)
    evaluations = [line for line in lines if "evaluation" in line]
    return {
        "run": folder.name,
        "seed": config.seed,
        "updates": config.updates,
        "verdict": progress.verdict(evaluations),
        "is_better": "better" in progress.verdict(evaluations),
        "signs": [one.name for one in diagnosis.diagnose_lines(config, lines, _summary(folder))],
    }


def _summary(folder: Path) -> Summary | None:
    """Read the summary; None of an earlier version, which has other numbers."""
    with suppress(RunError):
        return read_summary(folder)
    return None


if __name__ == "__main__":
    main()
