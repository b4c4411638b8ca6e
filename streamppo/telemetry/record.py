"""Records a run's numbers on the terminal, in metrics.jsonl, and when the driver ends in summary.json."""

import json
import logging
import math
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import cast

import msgspec

from streamppo import durable
from streamppo.errors import UNREADABLE, RunError
from streamppo.telemetry import context_reuse, metrics_file, summary
from streamppo.telemetry.attempts import AttemptTable, first_line
from streamppo.telemetry.diagnosis import Diagnosis
from streamppo.telemetry.live.display import Display, PlainLines
from streamppo.telemetry.metrics_file import FINISHED, Line
from streamppo.telemetry.summary import Summary
from streamppo.telemetry.tracking.sinks import Sinks
from streamppo.types import EngineReport, EvaluationReport, QueueReport, UpdateReport

PACKAGES = ("streamppo", "torch", "ray", "transformers", "msgspec", "numpy")
SUMMARY = "summary.json"
REPORTS_S = 8.0
"""Minimum seconds between two lines about a process. A process reports at least every 10 s."""
DAMAGE_SHOWN = 3
"""Maximum number of damaged lines that are logged one by one."""

log = logging.getLogger(__name__)


def read_summary(folder: Path) -> Summary | None:
    """Read summary.json; None if there is none, because the run continues or was killed. Raises `RunError`."""
    path = folder / SUMMARY
    try:
        return msgspec.json.decode(durable.read(path), type=Summary) if path.exists() else None
    except (OSError, *UNREADABLE) as error:
        raise RunError(f"no JSON summary of a run in {path}: {error}") from error


class RunRecord:
    """The record of one run. `started` is the `time.perf_counter()` at the start of the command.

    `version` is that of the last recorded update. In a resumed run, `version` and `wall_s` continue from the lines of
    the earlier parts. `display` shows the run to the user. New findings of `diagnosis` are logged. `sinks` are the
    trackers.
    """

    def __init__(
        self,
        folder: Path,
        started: float,
        seed: int,
        updates: int,
        *,
        display: Display | None = None,
        diagnosis: Diagnosis | None = None,
        sinks: Sinks | None = None,
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.updates = updates
        self.checksum = ""
        before, damage = metrics_file.content(folder)
        self._lost = bool(damage) or not before
        self.evaluated = {line["evaluation"] for line in before if "evaluation" in line}
        """The versions whose evaluations have been answered."""
        self.diagnosis = diagnosis
        self._sinks = sinks
        for line in before:
            if diagnosis is not None:
                diagnosis.add(line)
        self.version = max(metrics_file.recorded_versions(before), default=0)
        self._started = started - max((line["wall_s"] for line in before), default=0.0)
        self.display: Display = display or PlainLines()
        self._began, self._written_at = time.monotonic(), dict[str, float]()
        for sentence in damage[:DAMAGE_SHOWN]:
            log.info(sentence)
        if len(damage) > DAMAGE_SHOWN:
            log.info(f"{len(damage)} lines of {metrics_file.METRICS} are damaged: summary.json covers the others")
        metrics_file.drop_truncated_line(folder)
        for line in before:
            self.display.line(line)
        # The present summary covers only the earlier parts.
        (folder / SUMMARY).unlink(missing_ok=True)
        self._file = self._open()
        self._write("part", 1 + sum("part" in line for line in before), {"version": self.version})

    @property
    def wall_s(self) -> float:
        """Seconds of the run: of earlier parts up to their last line, and since the start of this command."""
        return time.perf_counter() - self._started

    @property
    def complete_to(self) -> float:
        """The newest version to which every update has a line; infinite if metrics.jsonl is missing or damaged."""
        return math.inf if self._lost else self.version

    def begin(self, version: int) -> None:
        """Record the updates after the learner's `version`, even if lines of earlier updates are lost."""
        self.version = max(self.version, version)
        self._lost = False

    def drop_unpublished(self, newest: int) -> None:
        """Remove the lines of updates above version `newest`: they were not published, and are repeated."""
        if self.version > newest:
            with durable.naming(self.folder / metrics_file.METRICS, RunError):
                # If `drop_after` raises a disk error, the run's last line is still written to the open file.
                metrics_file.drop_after(self.folder, newest)
                self._file.close()
                self._file = self._open()
            self.version = newest

    def update(self, report: UpdateReport) -> bool:
        """Record an update. Returns False if the update is repeated and already has a line."""
        if report.version <= self.version:
            self._write("redone", report.version)
            return False
        self._write("update", report.version, {**report.metrics, "lag_histogram": _named(report.lag_histogram)})
        self.version = report.version
        is_last = report.version == self.updates
        if self._due("learner-0") or is_last:
            self._write("phases", "learner-0", {"spent": report.phases})
        self.display.update(self._line(report), is_last=is_last)
        return True

    def remade(self, version: int, metrics: Mapping[str, float], lag_histogram: Mapping[int, int]) -> None:
        """Write a line with the metrics that the archived batch gives for an update whose line was lost."""
        self._write("remade", version, {**metrics, "lag_histogram": _named(lag_histogram)})

    def evaluation(self, version: int, parts: Sequence[EvaluationReport]) -> None:
        count, failed = sum(part.count for part in parts), sum(part.failed for part in parts)
        accuracy = sum(part.correct for part in parts) / count if count else None
        versions = [min(part.min_version for part in parts), max(part.max_version for part in parts)]
        answers = {"accuracy": accuracy, "count": count, "failed": failed, "versions": versions}
        self._write("evaluation", version, answers)
        self.evaluated.add(version)
        begin = f"[{self.wall_s:6.1f}s] version {version:4d}:"
        first = next((f", the first of them: {first_line(part.reason)}" for part in parts if part.failed), "")
        if accuracy is None:
            why = f"all {failed} held-out prompts failed{first}" if failed else "the task has no held-out prompts"
            log.info(f"{begin} no accuracy: {why}")
            return
        without = f", {failed} without a score{first}" if failed else ""
        log.info(f"{begin} accuracy {accuracy:.3f} on {count} held-out{without}")

    def restart(self, stage: str, reason: str) -> None:
        self._write("restart", stage, {"reason": reason})
        log.warning(f"{reason}; starting {stage} again")

    def queue(self, report: QueueReport) -> None:
        """Show a report of the queue, and write it at most every `REPORTS_S` seconds."""
        due = self._due("queue")
        skipped = {"skipped_prompts": report.skipped_prompts} if report.skipped_prompts else {}
        self._show_event("queue", report.ready, {"in_flight": report.in_flight, **skipped}, written=due)
        if due:
            self._write("phases", "queue", {"spent": report.phases})

    def engine(self, report: EngineReport) -> None:
        """Show a report of a rollout actor, and write it at most every `REPORTS_S` seconds."""
        due = self._due(report.actor)
        self._engine(report, written=due)
        if due:
            self._write("phases", report.actor, {"spent": report.phases})

    def _engine(self, report: EngineReport, *, written: bool) -> None:
        counters = {name: getattr(report, name) for name in ("version", "tokens", "busy_s", "idle_s")}
        agents = {"agents": report.agents} if report.agents else {}
        sampled = report.sample and msgspec.to_builtins(report.sample)
        content = {**counters, **context_reuse.sum_reports([report]), **agents, "sampled": sampled}
        self._show_event("engine", report.actor, content, written=written)

    def tick(self, doing: str) -> None:
        """Update the time on the display, and check the trackers. `doing` says what the driver waits for."""
        self.display.tick(doing, self.wall_s)
        if self._sinks is not None:
            self._sinks.check()

    def _due(self, process: str) -> bool:
        """Return whether `REPORTS_S` have passed since the last line of this process, or since the record began."""
        present = time.monotonic()
        if present - self._written_at.setdefault(process, self._began) < REPORTS_S:
            return False
        self._written_at[process] = present
        return True

    def _line(self, report: UpdateReport) -> str:
        m = report.metrics
        # A batch without the last segment of a completion has no reward, and one without trained tokens no entropy.
        reward, entropy = (f"{m[name]:.3f}" if name in m else "-" for name in ("reward", "entropy"))
        return (
            f"[{self.wall_s:6.1f}s] update {report.version:4d}/{self.updates}  reward {reward}  "
            f"entropy {entropy}  ess {m['ess']:.3f}  lag {m['lag_mean']:.2f}  "
            f"learner waits {m['wait_s'] / m['update_s']:.0%}"
        )

    def _write(self, kind: str, value: int | str, content: Mapping[str, object] | None = None) -> None:
        self._show_event(kind, value, content or {}, written=True)

    def _show_event(self, kind: str, value: int | str, content: Mapping[str, object], *, written: bool) -> None:
        """Show an event. With `written`, append the event to metrics.jsonl and send it to the trackers."""
        line = cast(Line, {kind: value, "wall_s": self.wall_s, **content})
        self.display.line(line)
        if not written:
            return
        self._diagnose(line)
        path = self.folder / metrics_file.METRICS
        with durable.naming(path, RunError):
            if not path.exists() and self.folder.exists():
                is_moved = os.fstat(self._file.fileno()).st_nlink > 0
                where = "it, or the run's folder, was moved with" if is_moved else "it was deleted with"
                log.info(f"{path} is gone: {where} its lines so far; the next ones go into a new file")
                self._file.close()
                self._file = self._open()
            self._file.write(json.dumps(line) + "\n")
        if self._sinks is not None:
            self._sinks.line(line)

    def _diagnose(self, line: Line) -> None:
        for finding in self.diagnosis.add(line) if self.diagnosis else ():
            if finding.holds:
                log.warning("%s: %s: %s", finding.name, finding.numbers, finding.advice)
            else:
                log.info("over: %s (last seen at update %d)", finding.name, finding.last)

    def _open(self) -> TextIOWrapper:
        return (self.folder / metrics_file.METRICS).open("a", buffering=1)

    def close(
        self,
        outcome: str,
        queue: QueueReport | None,
        engines: Sequence[EngineReport],
        *,
        attempts: AttemptTable | None = None,
    ) -> Summary:
        """Write summary.json and return its content. Raises `RunError`; after a failed run the error is only logged."""
        self.display.line({"end": outcome, "wall_s": self.wall_s})
        self.display.close()
        path = self.folder / SUMMARY
        try:
            with self._after(outcome):
                if queue is not None:
                    self._write("phases", "queue", {"spent": queue.phases})
                for engine in engines:
                    self._engine(engine, written=True)
                    self._write("phases", engine.actor, {"spent": engine.phases})
                self._write("end", outcome)
            content: Summary = {
                "outcome": outcome,
                **summary.line_totals(metrics_file.read(self.folder)),
                **summary.queue_totals(queue),
                "engines": summary.engine_totals(engines),
                "checksum": self.checksum,
                "seed": self.seed,
                "versions": {name: metadata.version(name) for name in PACKAGES},
            }
            if attempts is not None:
                content["attempts"] = attempts
            with self._after(outcome), durable.naming(path, RunError):
                durable.write(path, (json.dumps(content, indent=2) + "\n").encode())
        finally:
            # Closing fails if a buffered line cannot be written. The first attempt to write it has raised the error.
            with suppress(OSError):
                self._file.close()
            if self._sinks is not None:
                self._sinks.close()
        return content

    @contextmanager
    def _after(self, outcome: str) -> Generator[None]:
        """Raise a disk error of the block. After a failed run only log it: the run's error is more important."""
        try:
            yield
        except RunError as error:
            if outcome == FINISHED:
                raise
            log.info(str(error))


def _named(lag_histogram: Mapping[int, int]) -> dict[str, int]:
    return {str(lag): count for lag, count in lag_histogram.items()}
