"""Kill and resume runs as benchmarks/faults/chaos.py does, and verify each: a fault in one of them is a false alarm.

    python benchmarks/faults/verified.py --trials 50 --json verified.json

Each run has `--kills` kills at random times, of rollout actors, queue, learner ranks and driver; a killed driver is
resumed. Then `streamppo verify` compares its records and replays `--updates` of its updates.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.faults import chaos
from benchmarks.lib.runs import machine

Row = dict[str, Any]


def main() -> None:
    """Make the trials, print a row of each, and write all to `--json`. The exit code is 1 for an alarm."""
    options = _options()
    chance, rows = random.Random(options.seed), list[Row]()
    for number in range(options.trials):
        kinds = [chance.choice([*chaos.KINDS]) for _ in range(options.kills)]
        rows.append({"number": number, "kinds": kinds, **trial(options, kinds, chance.randrange(2**31))})
        print(json.dumps(rows[-1]), flush=True)
        found = {"machine": machine(), "seed": options.seed, **summary(rows), "trials": rows}
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))
    sys.exit(1 if any(row["faults"] or row["failure"] for row in rows) else 0)


def trial(options: argparse.Namespace, kinds: list[str], seed: int) -> Row:
    """Make a run with kills, and verify it: the faults that were found, and the seconds that it took."""
    row: Row = {"seed": seed, "faults": [], "notes": [], "remade": 0, "verify_s": None, "failure": ""}

    def verified(run: Path) -> bool:
        begin = time.perf_counter()
        told = verify(run, options.updates)
        row.update(faults=told["faults"], notes=told["notes"], remade=len(told["remade"]))
        row["verify_s"] = round(time.perf_counter() - begin, 2)
        return not told["faults"]

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            made = chaos.trial(options.config, Path(folder), tuple(options.set), kinds, seed, replays=verified)
            row["kills"] = dict(Counter(kill.kind for kill in made.kills))
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            row["failure"] = f"{type(error).__name__}: {error}"
    return row


def verify(run: Path, updates: int) -> Row:
    """What `streamppo verify --json` says of a run."""
    command = [sys.executable, "-m", "streamppo", "verify", str(run), "--json", "--updates", str(updates)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=chaos.environment())
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"{run}: not verified: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def summary(rows: list[Row]) -> Row:
    """The totals of the campaign."""
    seconds = [row["verify_s"] for row in rows if row["verify_s"] is not None]
    return {
        "runs": len(rows),
        "kills": sum(sum(row.get("kills", {}).values()) for row in rows),
        "alarms": sum(bool(row["faults"]) for row in rows),
        "failures": sum(bool(row["failure"]) for row in rows),
        "updates replayed": sum(row["remade"] for row in rows),
        "verify_s": {"median": statistics.median(seconds), "worst": max(seconds)} if seconds else None,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/math.toml"))
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--kills", type=int, default=4, help="kills of one run")
    parser.add_argument("--updates", type=int, default=2, help="updates that are replayed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=["updates=40"], metavar="section.field=value")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
