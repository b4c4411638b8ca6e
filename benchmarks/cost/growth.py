"""Memory of every process of a long run: resident MiB at 20 % of its updates and at the end, and the growth between.

    python benchmarks/cost/growth.py --updates 1000 --out growth.json [learner.ranks=2 ...]

The task is as small as possible, so that many updates take only minutes.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.runs import ended, machine
from streamppo.telemetry import metrics_file as lines

CONFIG = Path(__file__).parents[2] / "configs" / "math.toml"
SMALLEST = (
    "queue.batch_size=8",
    "rollout.slots=16",
    "rollout.in_flight=24",
    "rollout.max_tokens=2",
    "model.tiny={hidden_size=16, layers=1, max_steps=1}",
    "evaluation={every=0, prompts=8}",
    "checkpoint.every=0",
)
EARLY = 0.2
"""The share of the updates after which growth counts: by then caches and pools have reached their size."""
LATE = 0.98
LOOK_S = 0.25


class Growth(NamedTuple):
    """One process: resident KiB at `EARLY` and at `LATE`, and the growth per update in between."""

    name: str
    early_kib: float
    late_kib: float
    kib_per_update: float


def measure(updates: int, overrides: list[str]) -> list[Growth]:
    """Run `updates` updates; return the growth of every process that existed at both times. Exits if the run fails."""
    with tempfile.TemporaryDirectory() as runs:
        folder = Path(runs) / "math"
        settings = [*SMALLEST, f"updates={updates}", *overrides]
        command = [sys.executable, "-m", "streamppo", "run", str(CONFIG), "--runs", runs, *settings]
        with (Path(runs) / "log").open("w") as log, ended(subprocess.Popen(command, stdout=log, stderr=log)) as run:
            early, seen = look(run, folder, EARLY * updates, name=_name, read=_resident_kib)
            late, reached = look(run, folder, LATE * updates, name=_name, read=_resident_kib)
            if run.wait():
                sys.exit((Path(runs) / "log").read_text()[-4000:])
    return [
        Growth(name, early[pid, name], kib, (kib - early[pid, name]) / (reached - seen))
        for (pid, name), kib in late.items()
        if (pid, name) in early
    ]


def look(
    run: "subprocess.Popen[bytes]",
    folder: Path,
    version: float,
    *,
    name: Callable[[psutil.Process], str],
    read: Callable[[psutil.Process], float],
) -> tuple[dict[tuple[int, str], float], int]:
    """({(pid, name): value of `read`} for every process of the run once `version` is made, newest version by then)."""
    while run.poll() is None and made(folder) < version:
        time.sleep(LOOK_S)
    found: dict[tuple[int, str], float] = {}
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(run.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found[process.pid, "driver" if process == root else name(process)] = read(process)
    return found, made(folder)


def _resident_kib(process: psutil.Process) -> float:
    return process.memory_info().rss / 1024


def _name(process: psutil.Process) -> str:
    title = process.cmdline()
    # Ray appends the running method to the actor's name.
    return Path(title[0]).name.split()[0].split(".")[0] if title else process.name()


def made(folder: Path) -> int:
    """The number of updates so far, read from the end of metrics.jsonl."""
    path = folder / lines.METRICS
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        for line in reversed(file.read().split(b"\n")[1:-1]):
            if line.startswith(b'{"update"'):
                return int(json.loads(line)["update"])
    return 0


def main() -> None:
    """Measure, print a table, and write it with the machine's description to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    rows = sorted(measure(options.updates, options.overrides), key=lambda row: -row.kib_per_update)
    print(f"{'process':24} {'MiB at 20 %':>12} {'MiB at end':>12} {'KiB/update':>12}")
    for row in rows:
        print(f"{row.name:24} {row.early_kib / 1024:12.1f} {row.late_kib / 1024:12.1f} {row.kib_per_update:12.2f}")
    if options.out:
        content = {"machine": machine(), "updates": options.updates, "processes": [row._asdict() for row in rows]}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
