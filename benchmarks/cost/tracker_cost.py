"""CPU seconds of each tracker in one run of configs/math.toml with all trackers, and their share of the run's.

    pip install -c constraints.txt -e '.[tracking]'
    python benchmarks/cost/tracker_cost.py --json trackers.json [--updates 1100]

The processes are polled four times a second: the last quarter of a second of a process does not count. Child processes
of a tracker's libraries, such as wandb's server, count as part of the tracker's process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import ended, machine
from streamppo.telemetry.tracking import process as tracking

CONFIG = Path(__file__).parents[2] / "configs" / "math.toml"
TRACKERS = ("tensorboard", "wandb", "mlflow")
KINDS = (*TRACKERS, "prometheus")
GOAL = 0.02
"""The largest share allowed for one tracker, set before any measurement."""
LOOK_S = 0.25
PORT = 9464


def measure(updates: int, overrides: Sequence[str]) -> dict[str, float]:
    """CPU seconds by tracker, and in `all` those of all trackers and the run together. Exits if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        settings = [f"telemetry.trackers={json.dumps(TRACKERS)}"]
        settings += [f'telemetry.prometheus={{kind="endpoint", port={PORT}}}', f"updates={updates}", *overrides]
        command = [sys.executable, "-m", "streamppo", "run", str(CONFIG), "--runs", folder, *settings]
        environment = {
            **os.environ,
            "WANDB_MODE": "offline",
            "MLFLOW_TRACKING_URI": f"{folder}/mlflow",
            "MLFLOW_ALLOW_FILE_STORE": "true",
        }
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            with ended(process) as run:
                spent = _watched(run)
        if run.returncode or "has ended, the run continues without it" in log.read_text():
            sys.exit(log.read_text()[-4000:])
    return {**{kind: spent[kind] for kind in KINDS}, "all": sum(spent.values())}


def _watched(run: "subprocess.Popen[bytes]") -> Mapping[str, float]:
    """CPU seconds by kind of process until the run ends; the run's own processes are `run`."""
    # Process ids are reused: the key is the id and the creation time.
    newest: dict[tuple[int, float], tuple[str, float]] = {}
    while run.poll() is None:
        with suppress(psutil.Error):
            _look(psutil.Process(run.pid), "run", newest)
        time.sleep(LOOK_S)
    spent: defaultdict[str, float] = defaultdict(float)
    for kind, seconds in newest.values():
        spent[kind] += seconds
    return spent


def _look(process: psutil.Process, above: str, newest: dict[tuple[int, float], tuple[str, float]]) -> None:
    with suppress(psutil.Error):
        key = process.pid, process.create_time()
        # A descendant of a tracker's process belongs to the tracker, whatever it executes.
        kind = above if above in KINDS else _kind(process)
        times = process.cpu_times()
        newest[key] = kind, times.user + times.system
        for child in process.children():
            _look(child, kind, newest)


def _kind(process: psutil.Process) -> str:
    """The tracker of a process, by the file to which its stderr is redirected; else `run`."""
    if tracking.__name__ not in process.cmdline():
        return "run"
    return next(kind for kind in KINDS if Path(f"/proc/{process.pid}/fd/2").resolve().name == f"{kind}.log")


def main() -> None:
    """Measure, print a table, and write it with the machine's description to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    spent = measure(options.updates, options.overrides)
    shares = {kind: spent[kind] / (spent["all"] - sum(spent[other] for other in KINDS)) for kind in KINDS}
    for kind in KINDS:
        print(f"{kind:12} {spent[kind]:6.2f} s {shares[kind]:6.1%} {'met' if shares[kind] < GOAL else 'not met'}")
    if options.json:
        result = {"machine": machine(), "updates": options.updates, "goal": GOAL, "cpu_s": spent, "shares": shares}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
