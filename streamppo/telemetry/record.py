"""What a run leaves behind: a live line on the terminal, metrics.jsonl, summary.json.

runs/NAME/metrics.jsonl    one line for each update and each evaluation, as they happen
runs/NAME/summary.json     the whole run in one object, written at its end, however it ends
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from streamppo import durable
from streamppo.errors import RunError
from streamppo.types import EngineReport, EvaluationReport, QueueReport, UpdateReport

PACKAGES = ("streamppo", "torch", "ray", "transformers", "msgspec", "numpy")
FINISHED = "finished"
"""The outcome of a run that made all its updates."""
WINDOW = 10
"""Updates that "start" and "final" rewards are averaged over."""


class Record:
    """One run's numbers. `started` is the `time.perf_counter()` at which the command began.

    In the folder of an earlier part of the run it goes on after `version`, the last update that is written down there.
    """

    def __init__(self, folder: Path, started: float, seed: int, updates: int) -> None:
        self.folder = folder
        self.started = started
        self.seed = seed
        self.updates = updates
        self.reports: list[UpdateReport] = []
        self.evaluations: list[tuple[int, float]] = []
        self.lags: Counter[int] = Counter()
        self.first_update_s: float | None = None
        self.checksum = ""
        self.redone = 0
        self.restarts: Mapping[str, int] = {}
        self.version = _last_update(folder / "metrics.jsonl")
        self._file = (folder / "metrics.jsonl").open("a", buffering=1)
        self._live = sys.stdout.isatty()
        self._printed = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds since the command."""
        return time.perf_counter() - self.started

    def say(self, text: str) -> None:
        """One lasting line on the terminal."""
        print(f"\r\033[K{text}" if self._live else text, flush=True)

    def update(self, report: UpdateReport) -> bool:
        """One update was made. False if it was only made again, and is written down already."""
        if report.version <= self.version:
            self.redone += 1
            return False
        self.version = report.version
        if self.first_update_s is None:
            self.first_update_s = self.wall_s
        self.reports.append(report)
        self.lags.update(report.lag_histogram)
        self._write({"update": report.version, "wall_s": self.wall_s, **report.metrics})
        if self._live:
            print(f"\r\033[K{self._line(report)}", end="", flush=True)
        elif self.wall_s - self._printed > 10 or report.version == self.updates:
            self._printed = self.wall_s
            print(self._line(report), flush=True)
        return True

    def evaluation(self, asked: int, parts: Sequence[EvaluationReport]) -> None:
        """All actors have answered the evaluation that was asked for after update `asked`."""
        count, failed = sum(part.count for part in parts), sum(part.failed for part in parts)
        accuracy = sum(part.correct for part in parts) / count if count else float("nan")
        versions = (min(part.min_version for part in parts), max(part.max_version for part in parts))
        self.evaluations.append((asked, accuracy))
        row = {
            "evaluation": asked,
            "accuracy": accuracy,
            "count": count,
            "failed": failed,
            "versions": versions,
        }
        self._write({"wall_s": self.wall_s, **row})
        noted = f", {failed} without a score" if failed else ""
        self.say(f"[{self.wall_s:6.1f}s] version {asked:4d}: accuracy {accuracy:.3f} on {count} held-out{noted}")

    def _line(self, report: UpdateReport) -> str:
        m = report.metrics
        return (
            f"[{self.wall_s:6.1f}s] update {report.version:4d}/{self.updates}  reward {m['reward']:.3f}  "
            f"entropy {m['entropy']:.3f}  ess {m['ess']:.3f}  lag {m['lag_mean']:.2f}  "
            f"learner waits {m['wait_s'] / m['update_s']:.0%}"
        )

    def _write(self, row: dict[str, Any]) -> None:
        with durable.naming(self.folder / "metrics.jsonl", RunError):
            self._file.write(json.dumps(row) + "\n")

    def close(self, outcome: str, queue: QueueReport | None, engines: Sequence[EngineReport]) -> dict[str, Any]:
        """Write summary.json and return it. `outcome` is `FINISHED` or why the run ended early.

        Raises `RunError` if it cannot be written; after another error that is only said.
        """
        summary, path = self._summary(outcome, queue, engines), self.folder / "summary.json"
        # A line that is still held here was refused before, and that was told.
        with suppress(OSError):
            self._file.close()
        try:
            with durable.naming(path, RunError):
                durable.write(path, (json.dumps(summary, indent=2) + "\n").encode())
        except RunError as error:
            if outcome == FINISHED:
                raise
            self.say(str(error))
        return summary

    def _summary(self, outcome: str, queue: QueueReport | None, engines: Sequence[EngineReport]) -> dict[str, Any]:
        rewards = [report.metrics["reward"] for report in self.reports]
        wall_s = self.wall_s
        generated = sum(engine.tokens for engine in engines)
        busy_s, idle_s = sum(e.busy_s for e in engines), sum(e.idle_s for e in engines)
        swaps = sum(engine.swaps for engine in engines)
        return {
            "outcome": outcome,
            "eval_accuracy": _ends([accuracy for _, accuracy in self.evaluations], 1),
            "evaluations": self.evaluations,
            "reward": _ends(rewards, WINDOW),
            "updates": self.version,
            "redone": self.redone,
            "restarts": {**self.restarts, "engine": sum(engine.restarts for engine in engines)},
            "wall_s": wall_s,
            "first_update_s": self.first_update_s,
            "trajectories": queue.consumed if queue else None,
            "tokens_generated": generated,
            "tokens_trained": self._total("tokens_trained"),
            "tokens_per_s": generated / wall_s,
            "lag": lag_summary(self.lags),
            "learner_idle_share": self._total("wait_s") / max(self._total("update_s"), 1e-9),
            "engine_s": busy_s + idle_s,
            "engine_idle_share": idle_s / max(busy_s + idle_s, 1e-9),
            "pushes": self.version,
            "push_ms": self._total("push_ms") / max(1, len(self.reports) - 1),
            "swaps": swaps,
            "swap_ms": sum(engine.swap_s for engine in engines) * 1e3 / max(swaps, 1),
            "dropped": queue.dropped if queue else None,
            "failed": queue.failed if queue else None,
            "dead_letters": queue.dead_letters if queue else None,
            "scorers": [{"actor": e.actor, **msgspec.to_builtins(s)} for e in engines for s in e.scorers],
            "too_long": dict(engines[0].too_long) if engines else {},
            "mean_tokens": None
            if queue is None
            else {"consumed": queue.mean_tokens_consumed, "dropped": queue.mean_tokens_dropped},
            "checksum": self.checksum,
            "engines": [{"actor": e.actor, "version": e.version, "checksum": e.checksum} for e in engines],
            "seed": self.seed,
            "versions": {name: metadata.version(name) for name in PACKAGES},
        }

    def _total(self, name: str) -> float:
        return sum(report.metrics[name] for report in self.reports)


def _last_update(path: Path) -> int:
    """The last update in a file of metrics; a line that was cut by a kill is removed."""
    if not path.exists():
        return 0
    whole = path.read_bytes()
    lines = whole[: whole.rfind(b"\n") + 1]
    if lines != whole:
        path.write_bytes(lines)
    return max((row["update"] for row in map(json.loads, lines.splitlines()) if "update" in row), default=0)


def lag_summary(histogram: Counter[int]) -> dict[str, Any]:
    """Mean, 99th percentile and maximum, in versions, over all tokens; and the histogram itself."""
    total = sum(histogram.values())
    if not total:
        return {"mean": None, "p99": None, "max": None, "histogram": {}}
    seen, p99 = 0, 0
    for p99 in sorted(histogram):
        seen += histogram[p99]
        if seen >= 0.99 * total:
            break
    mean = sum(lag * count for lag, count in histogram.items()) / total
    return {"mean": mean, "p99": p99, "max": max(histogram), "histogram": dict(sorted(histogram.items()))}


def _ends(values: Sequence[float], window: int) -> dict[str, float | None]:
    if not values:
        return {"start": None, "final": None}
    first, last = values[:window], values[-window:]
    return {"start": sum(first) / len(first), "final": sum(last) / len(last)}
