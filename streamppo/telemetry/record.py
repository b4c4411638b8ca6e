"""What a run leaves behind: a live line on the terminal, metrics.jsonl, summary.json.

runs/NAME/metrics.jsonl    one line for whatever happens, as it happens
runs/NAME/summary.json     the whole run in one object, written when its driver ends; not there while one lives, nor
                           after one that was killed
"""

import json
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from streamppo import durable
from streamppo.errors import RunError
from streamppo.telemetry import metrics_file as lines
from streamppo.telemetry import summary
from streamppo.types import EngineReport, EvaluationReport, QueueReport, UpdateReport

PACKAGES = ("streamppo", "torch", "ray", "transformers", "msgspec", "numpy")
SUMMARY = "summary.json"
FINISHED = "finished"
"""The outcome of a run that made all its updates."""


class Record:
    """One run's numbers. `started` is the `time.perf_counter()` at which the command began.

    In the folder of an earlier part of the run it goes on after `version`, the last update that is written down there,
    and its seconds after those of the last line. Raises `RunError` where metrics.jsonl is damaged.
    """

    def __init__(self, folder: Path, started: float, seed: int, updates: int) -> None:
        self.folder = folder
        self.seed = seed
        self.updates = updates
        self.checksum = ""
        before = lines.read(folder)
        self.version = max((line["update"] for line in before if "update" in line), default=0)
        self._started = started - (before[-1]["wall_s"] if before else 0.0)
        self._live = sys.stdout.isatty()
        self._printed = 0.0
        lines.mend(folder)
        # It tells of the parts before this one.
        (folder / SUMMARY).unlink(missing_ok=True)
        self._file = (folder / lines.METRICS).open("a", buffering=1)
        self._write("part", 1 + sum("part" in line for line in before), version=self.version)

    @property
    def wall_s(self) -> float:
        """Seconds that the run has gone on for: this part since its command, earlier ones up to their last line."""
        return time.perf_counter() - self._started

    def say(self, text: str) -> None:
        """One lasting line on the terminal."""
        print(f"\r\033[K{text}" if self._live else text, flush=True)

    def update(self, report: UpdateReport) -> bool:
        """One update was made. False if it was only made again, and is written down already."""
        if report.version <= self.version:
            self._write("redone", report.version)
            return False
        lags = {str(lag): count for lag, count in report.lag_histogram.items()}
        self._write("update", report.version, **report.metrics, lag_histogram=lags)
        self.version = report.version
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
        self._write("evaluation", asked, accuracy=accuracy, count=count, failed=failed, versions=versions)
        noted = f", {failed} without a score" if failed else ""
        self.say(f"[{self.wall_s:6.1f}s] version {asked:4d}: accuracy {accuracy:.3f} on {count} held-out{noted}")

    def restart(self, stage: str, reason: str) -> None:
        """A stage died, and is started again."""
        self._write("restart", stage, reason=reason)
        self.say(f"{reason}; starting {stage} again")

    def _line(self, report: UpdateReport) -> str:
        m = report.metrics
        return (
            f"[{self.wall_s:6.1f}s] update {report.version:4d}/{self.updates}  reward {m['reward']:.3f}  "
            f"entropy {m['entropy']:.3f}  ess {m['ess']:.3f}  lag {m['lag_mean']:.2f}  "
            f"learner waits {m['wait_s'] / m['update_s']:.0%}"
        )

    def _write(self, kind: str, value: int | str, **more: Any) -> None:
        line = {kind: value, "wall_s": self.wall_s, **more}
        with durable.naming(self.folder / lines.METRICS, RunError):
            self._file.write(json.dumps(line) + "\n")

    def close(self, outcome: str, queue: QueueReport | None, engines: Sequence[EngineReport]) -> dict[str, Any]:
        """Write summary.json and return it. `outcome` is `FINISHED` or why the run ended early.

        Raises `RunError` if it cannot be written; after another error that is only said.
        """
        path = self.folder / SUMMARY
        try:
            with self._after(outcome):
                self._write("end", outcome)
            content = {
                "outcome": outcome,
                **summary.of_lines(lines.read(self.folder)),
                **summary.of_queue(queue),
                "engines": summary.of_engines(engines),
                "checksum": self.checksum,
                "seed": self.seed,
                "versions": {name: metadata.version(name) for name in PACKAGES},
            }
            with self._after(outcome), durable.naming(path, RunError):
                durable.write(path, (json.dumps(content, indent=2) + "\n").encode())
        finally:
            # A line that is still held here was refused before, and that was told.
            with suppress(OSError):
                self._file.close()
        return content

    @contextmanager
    def _after(self, outcome: str) -> Generator[None]:
        """What the disk refuses after another error does not hide it."""
        try:
            yield
        except RunError as error:
            if outcome == FINISHED:
                raise
            self.say(str(error))
