"""Shared by benchmarks: a real run in a separate process, the machine's description, goals, and a table."""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from streamppo.telemetry import metrics_file as lines
from streamppo.telemetry.record import SUMMARY


class Run(NamedTuple):
    """The results of a run: summary.json, the lines of metrics.jsonl by kind, and measurements from outside.

    `peak_memory_mib` is over all its processes together; shared pages count once.
    """

    summary: dict[str, Any]
    updates: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    first_output_s: float
    peak_memory_mib: float


def run(config: Path, overrides: Sequence[str], environment: Mapping[str, str] | None = None) -> Run:
    """Run `streamppo run CONFIG OVERRIDES` in a temporary folder. Exits if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        log, runs = Path(folder) / "log", Path(folder) / "runs"
        command = [sys.executable, "-m", "streamppo", "run", str(config), "--runs", str(runs), *overrides]
        with log.open("w") as output:
            begin = time.perf_counter()
            process = subprocess.Popen(
                command, env={**os.environ, **(environment or {})}, stdout=output, stderr=subprocess.STDOUT
            )
            with ended(process):
                first_output_s, peak = _watched(process, log, begin)
        if process.returncode:
            sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{log.read_text()[-4000:]}")
        (made,) = runs.iterdir()
        summary, updates = json.loads((made / SUMMARY).read_text()), lines.updates(made)
        evaluations = [line for line in lines.read(made) if "evaluation" in line]
    return Run(summary, updates, evaluations, first_output_s, peak)


@contextlib.contextmanager
def ended(run: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """End the run with the block, also if a time limit ends the benchmark."""
    try:
        yield run
    finally:
        run.terminate()
        run.wait()


def _watched(process: "subprocess.Popen[bytes]", log: Path, begin: float) -> tuple[float, float]:
    """Wait until a run ends; return the seconds until its first output, and its peak memory in MiB."""
    first_output_s, peak = 0.0, 0.0
    while process.poll() is None:
        if not first_output_s and log.stat().st_size:
            first_output_s = time.perf_counter() - begin
        # Reading the memory maps of all processes takes milliseconds; it must not slow down the measured run.
        if first_output_s:
            peak = max(peak, memory_mib(process.pid))
            time.sleep(2.0)
        time.sleep(0.05)
    return first_output_s, peak


def waiting(in_flight: int, where: str = "process") -> list[str]:
    """Overrides for a reward with the latency of `benchmarks.lib.latency.LATENCY` seconds, which may be 0.

    `in_flight` bounds the trajectories that are sampled or wait for rewards; if it is above the queue's admission, only
    `max_lag` bounds them.
    """
    return [
        f"rollout.in_flight={in_flight}",
        f"reward.concurrency={in_flight}",
        f"reward.where={where}",
        "reward.function=benchmarks.lib.latency:score",
        "evaluation.every=0",
        "evaluation.prompts=64",
        "checkpoint.every=0",
    ]


def memory_mib(root: int) -> float:
    """The proportional set size of `root` and all its descendants, in MiB."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_bytes().rpartition(b")")[2].split()[1])
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
    """Cores, processor, the load of the last minute, the versions of the main packages, and the commit."""
    packages = ("streamppo", "torch", "ray", "transformers")
    versions = {name: metadata.version(name) for name in packages}
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit of this folder, with "-dirty" if files differ from it; "" outside of a git repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


PLAIN = (
    "algorithm.correction={kind='truncate',level='token',cap=2.0}",
    "algorithm.negative_weight=1",
    "algorithm.whiten.over=auto",
    "learner.betas=[0.9,0.95]",
    "learner.minibatches=1",
)
"""One step per update, weights truncated at 2, negative advantages in full: the baseline of studies of one choice."""


class Goal(NamedTuple):
    """A goal set before any measurement: the measured number must be at least `least`, or at most `most`."""

    name: str
    least: float | None = None
    most: float | None = None

    def verdict(self, *repeats: float) -> dict[str, Any]:
        """The verdict on the median of the repeated measurements; `met` is None without any."""
        measured, met = statistics.median(repeats) if repeats else None, None
        if measured is not None:
            met = (self.least is None or measured >= self.least) and (self.most is None or measured <= self.most)
        spread = [min(repeats), max(repeats)] if repeats else None
        bounds = {"least": self.least, "most": self.most}
        return {"goal": self.name, **bounds, "measured": measured, "range": spread, "met": met}


def told(verdict: Mapping[str, Any]) -> str:
    """A verdict as one line of text."""
    word = {True: "met", False: "NOT met", None: "not measured"}[verdict["met"]]
    bound = f"at least {verdict['least']:g}" if verdict["least"] is not None else f"at most {verdict['most']:g}"
    if verdict["measured"] is None:
        return f"{word:12} {verdict['goal']}, {bound}"
    low, high = verdict["range"]
    return f"{word:12} {verdict['goal']}, {bound}: {verdict['measured']:.3g} ({low:.3g} to {high:.3g})"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A text table of rows with the same names, which are its header; floats have four digits, None is a dash."""
    texts = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in texts)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
