"""CPU milliseconds of one update, by process and by phase; they hardly depend on the machine's other load.

    python benchmarks/cost/cost.py --json cost.json --plot cost.png [--updates 200] [--repeat 3]
        [rollout.max_tokens=64 ...]

Measured between two updates of a run of configs/math.toml without evaluations, when all processes are warm. The table
has the median, the smallest and the largest value over the repetitions; below it are the phases of each process over
the whole run (streamppo/process.py), where `elsewhere` is the rest of a process. `first update` is the time in
milliseconds from the start of the command to the first update, warm start included; `counting phases` is part of the
processes above it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cost.growth import look
from benchmarks.lib import plots
from benchmarks.lib.runs import ended, machine
from streamppo.process import WHOLE, phase
from streamppo.telemetry import metrics_file, phase_times

CONFIG = Path(__file__).parents[2] / "configs" / "math.toml"
QUIET = ("evaluation={every=0, prompts=8}", "checkpoint.every=0")
WARM = 40
"""Updates before the measurement starts."""
FIRST = "first update"
SPANS, TRIED = "counting phases", 20_000
"""The row of the cost of counting phases, which other rows include; and the calls timed to measure it."""
NAMED = 0.025
"""Smallest share of the highest bar for which the plot names a phase."""
NAMES = {"ray::RolloutActor": "rollout", "ray::Rank": "learner", "ray::QueueActor": "queue", "ray::": "other actors"}
"""Prefixes of process titles, and their names in the table; all other processes are Ray's."""


def measure(updates: int, overrides: Sequence[str], *, warm: int = WARM) -> dict[str, float]:
    """CPU milliseconds per update by kind of process and phase; `wall`, `first update`. Exits if the run fails.

    The first `warm` updates do not count.
    """
    with tempfile.TemporaryDirectory() as runs:
        log, last = Path(runs) / "log", warm + updates
        settings = [*QUIET, f"updates={last + 10}", *overrides]
        command = [sys.executable, "-m", "streamppo", "run", str(CONFIG), "--runs", runs, *settings]
        with log.open("w") as output, ended(subprocess.Popen(command, stdout=output, stderr=output)) as run:
            first, seen = look(run, Path(runs) / "math", warm, name=_name, read=_cpu_s)
            begin = time.perf_counter()
            then, reached = look(run, Path(runs) / "math", last, name=_name, read=_cpu_s)
            end = time.perf_counter()
            if run.poll() or reached < last:
                sys.exit(log.read_text()[-4000:])
        phases, start_s = _phases(Path(runs) / "math"), metrics_file.updates(Path(runs) / "math")[0]["wall_s"]
        spans = _spans_ms(Path(runs) / "math")
    spent: defaultdict[str, float] = defaultdict(float)
    for key, seconds in then.items():
        spent[key[1]] += 1e3 * (seconds - first.get(key, 0.0)) / (reached - seen)
    walls = {"wall": 1e3 * (end - begin) / (reached - seen), FIRST: 1e3 * start_s, SPANS: spans}
    return {**spent, "all": sum(spent.values()), **walls, **phases}


def _phases(run: Path) -> dict[str, float]:
    """CPU milliseconds per update by `process: phase`; rollout actors are added up."""
    found: defaultdict[str, float] = defaultdict(float)
    for process, spent in phase_times.per_update(metrics_file.read(run)).items():
        for name, one in spent.items():
            if name != WHOLE:
                found[f"{process.partition('-')[0]}: {name}"] += one.cpu_ms
    return found


def _spans_ms(run: Path) -> float:
    """CPU milliseconds per update for counting phases: their calls, times the measured cost of one call."""
    calls = sum(
        one.calls for spent in phase_times.per_update(metrics_file.read(run)).values() for one in spent.values()
    )
    begin = time.thread_time()
    for _ in range(TRIED):
        with phase("nothing"):
            pass
    return calls * 1e3 * (time.thread_time() - begin) / TRIED


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _name(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    return next((name for begin, name in NAMES.items() if title.startswith(begin)), "ray")


def _table(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    found = {name for row in rows for name in row}
    names = sorted(found, key=lambda name: (name.partition(":")[0] if ":" in name else "", -rows[0].get(name, 0.0)))
    columns = {name: [row.get(name, 0.0) for row in rows] for name in names}
    return {
        name: {"median": statistics.median(column), "min": min(column), "max": max(column)}
        for name, column in columns.items()
    }


def _costs(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    processes = ("rollout", "learner", "queue", "all")
    costs = {f"update, {name}: CPU ms": table[name]["median"] for name in processes}
    return {**costs, "start: seconds until the first update": table[FIRST]["median"] / 1e3}


def _plot(table: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw a stacked bar of phases for each process, with its range; large phases are named."""
    processes = [name for name in NAMES.values() if name in table and table[name]["median"] > 1]
    named = NAMED * max(table[name]["median"] for name in processes)
    with plots.axes(path, 1, width=7, height=6) as (axis,):
        for process in processes:
            bottom = 0.0
            for name, row in table.items():
                if name.startswith(f"{process}: "):
                    axis.bar(process, row["median"], bottom=bottom)
                    if row["median"] > named:
                        middle = bottom + row["median"] / 2
                        axis.text(process, middle, name.partition(": ")[2], ha="center", va="center", fontsize="small")
                    bottom += row["median"]
            low, middle, high = (table[process][name] for name in ("min", "median", "max"))
            axis.errorbar(process, middle, [[middle - low], [high - middle]], color="black", marker="o", capsize=4)
        axis.set(ylabel="CPU ms an update: median and range")


def main() -> None:
    """Measure, print a table, and write it with the machine's description to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    rows = [measure(options.updates, options.overrides) for _ in range(options.repeat)]
    table = _table(rows)
    print(f"{'CPU ms an update':24} {'median':>8} {'min':>8} {'max':>8}")
    for name, row in table.items():
        print(f"{name:24} {row['median']:8.1f} {row['min']:8.1f} {row['max']:8.1f}")
    if options.plot:
        _plot(table, options.plot)
    if options.json:
        content = {
            "machine": machine(),
            "costs": _costs(table),
            "updates": options.updates,
            "overrides": options.overrides,
            "runs": rows,
        }
        options.json.write_text(json.dumps({**content, "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
