"""What the benchmarks share: a real run in a process of its own, and the machine that it ran on."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from streamppo.telemetry import metrics_file as lines
from streamppo.telemetry.record import SUMMARY


class Run(NamedTuple):
    """What a run left behind: summary.json, the updates' lines of metrics.jsonl, and what was seen of it.

    `peak_memory_mib` is of all its processes together, shared pages counted once.
    """

    summary: dict[str, Any]
    updates: list[dict[str, Any]]
    first_output_s: float
    peak_memory_mib: float


def run(config: Path, overrides: Sequence[str], environment: Mapping[str, str] | None = None) -> Run:
    """`streamppo run CONFIG OVERRIDES` in a folder of its own. Ends the benchmark if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        log, runs = Path(folder) / "log", Path(folder) / "runs"
        command = [sys.executable, "-m", "streamppo", "run", str(config), "--runs", str(runs), *overrides]
        with log.open("w") as output:
            begin = time.perf_counter()
            process = subprocess.Popen(
                command, env={**os.environ, **(environment or {})}, stdout=output, stderr=subprocess.STDOUT
            )
            first_output_s, peak = 0.0, 0.0
            while process.poll() is None:
                if not first_output_s and log.stat().st_size:
                    first_output_s = time.perf_counter() - begin
                # Reading the memory maps of every process costs milliseconds; it must not slow down what it measures.
                if first_output_s:
                    peak = max(peak, _memory_mib(process.pid))
                    time.sleep(2.0)
                time.sleep(0.05)
        if process.returncode:
            sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{log.read_text()[-4000:]}")
        (made,) = runs.iterdir()
        summary, updates = json.loads((made / SUMMARY).read_text()), lines.updates(made)
    return Run(summary, updates, first_output_s, peak)


def waiting(in_flight: int, where: str = "process") -> list[str]:
    """Overrides for a reward that waits as many seconds as `benchmarks.latency.LATENCY` says, also if that is none.

    `in_flight` bounds what is sampled and what waits; where the queue admits no more, nothing but `max_lag` bounds it.
    """
    return [
        f"rollout.in_flight={in_flight}",
        f"reward.concurrency={in_flight}",
        f"reward.where={where}",
        "reward.function=benchmarks.latency:score",
        "evaluation.every=0",
        "evaluation.prompts=64",
        "checkpoint.every=0",
    ]


def _memory_mib(root: int) -> float:
    """Proportional set size of `root` and everything that it started, in MiB."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    kibibytes = 0
    for process in parents:
        ancestor = process
        while ancestor not in (0, root):
            ancestor = parents.get(ancestor, 0)
        if ancestor == root:
            with contextlib.suppress(OSError):
                rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
                kibibytes += int(rollup.partition("\nPss:")[2].split()[0])
    return kibibytes / 1024


def machine() -> dict[str, Any]:
    """Cores, processor, and the versions of what matters."""
    packages = ("streamppo", "torch", "ray", "transformers")
    versions = {name: metadata.version(name) for name in packages}
    return {"cores": os.cpu_count(), "cpu": _cpu(), "python": platform.python_version(), "versions": versions}


def commit() -> str:
    """The commit that is measured; it ends in "-dirty" if files differ from it."""
    folder = Path(__file__).parent
    return subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=folder, text=True).strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
