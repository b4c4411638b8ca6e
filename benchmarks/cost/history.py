"""Time and space of fork, bundle, replay, try, bisect and verify, on a run of configs/math.toml with 101 updates.

    python benchmarks/cost/history.py --json history.json [--rounds 3]

The run has the checkpoints of its first and its last version alone, so that version 100 is replayed by 100 updates.
Space is what a command has added to the disk, without the files that a fork shares with the run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import machine, table

CONFIG = Path(__file__).parents[2] / "configs" / "math.toml"
OVERRIDES = ("updates=101", "checkpoint.every=0", "evaluation.every=0", "name=math")


def commands(run: Path, place: Path) -> dict[str, list[str]]:
    """The arguments of each command; what they write is in `place`."""
    file = str(place / "50.safetensors")
    return {
        "fork --at 100": ["fork", str(run), "--at", "100", "--runs", str(place / "forks")],
        "bundle --update 50": ["bundle", str(run), "--update", "50", "--to", file],
        "replay FILE": ["replay", file],
        "replay RUN --to 50": ["replay", str(run), "--to", "50"],
        "try --version 50 -n 16": ["try", str(run), "--version", "50", "--prompt", "3", "-n", "16"],
        "bisect --metric reward": ["bisect", str(run), "--metric", "reward", "--above", "0.3"],
        "verify --updates 2": ["verify", str(run), "--updates", "2"],
    }


def measure(run: Path, place: Path) -> dict[str, dict[str, float]]:
    """Seconds and MiB of each command. Exits if one fails."""
    found: dict[str, dict[str, float]] = {}
    for name, arguments in commands(run, place).items():
        before, begin = _size(place, run), time.perf_counter()
        _streamppo(*arguments)
        seconds = time.perf_counter() - begin
        found[name] = {"seconds": seconds, "MiB": (_size(place, run) - before) / 2**20}
    return found


def _size(*folders: Path) -> int:
    """Bytes of the files in `folders`, each once, however many links it has."""
    files = [path.lstat() for folder in folders for path in folder.rglob("*") if path.is_file()]
    return sum({(one.st_dev, one.st_ino): one.st_size for one in files}.values())


def _streamppo(*arguments: str) -> None:
    command = [sys.executable, "-m", "streamppo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> None:
    """Print and write the median of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about, rounds = machine(), list[dict[str, dict[str, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        _streamppo("run", str(CONFIG), "--runs", folder, *OVERRIDES)
        for number in range(options.rounds):
            place = Path(folder) / f"{number}"
            place.mkdir()
            rounds.append(measure(Path(folder) / "math", place))
    rows: list[dict[str, Any]] = [
        {"command": name, **{key: statistics.median(one[name][key] for one in rounds) for key in ("seconds", "MiB")}}
        for name in rounds[0]
    ]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "medians": rows, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
