"""False alarms: the signs that the diagnosis sees in runs that end better than they began.

python benchmarks/alarms.py runs/letters-1 runs/letters-2 ... [--json out.json]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from streamppo.config import file as configfile
from streamppo.telemetry import diagnosis, metrics_file, progress
from streamppo.telemetry.record import read_summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs that have ended")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    rows = [_signs(folder) for folder in options.runs]
    for row in rows:
        print(f"{row['run']}, seed {row['seed']}: {row['verdict']}; signs: {', '.join(row['signs']) or 'none'}")
    alarms = sum(len(row["signs"]) for row in rows if not row["is_worse"])
    print(f"{alarms} signs in {sum(not row['is_worse'] for row in rows)} good runs of {len(rows)}")
    if options.json:
        options.json.write_text(json.dumps({"alarms": alarms, "runs": rows}, indent=2) + "\n")


def _signs(folder: Path) -> dict[str, Any]:
    config, lines = configfile.load(folder / configfile.CONFIG), metrics_file.read(folder)
    evaluations = [line for line in lines if "evaluation" in line]
    return {
        "run": folder.name,
        "seed": config.seed,
        "updates": config.updates,
        "verdict": progress.verdict(evaluations),
        "is_worse": progress.is_worse(evaluations),
        "signs": [one.name for one in diagnosis.of_lines(config, lines, read_summary(folder))],
    }


if __name__ == "__main__":
    main()
