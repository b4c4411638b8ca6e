"""The driver's side of trackers: it starts and checks their processes, and waits for them when the run ends.

    running -> lost      the process ended early: one warning, with the reason from its log
            -> late      the process did not end within `END_S` of the run's end: killed, one warning
            -> ended

In a resumed run, each tracker first sends the lines of metrics.jsonl that it has not sent before.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from streamppo.config import diff
from streamppo.config.sections import Config, Endpoint, RayMetrics
from streamppo.telemetry.metrics_file import Line
from streamppo.telemetry.tracking import process
from streamppo.telemetry.tracking.trackers.run import Kind, TrackedRun

END_S = process.CLOSE_S
"""Seconds for which a run waits at its end for all trackers together."""
HANGS = "Timeout ("
"""The beginning of the line that faulthandler writes when a time limit has passed."""

log = logging.getLogger(__name__)


class Sinks:
    """The trackers that `config` names for the run in `folder`."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._folder = folder.resolve()
        self._processes: dict[Kind, subprocess.Popen[bytes]] = {
            run.kind: self._start(run) for run in runs(config, self._folder)
        }
        self._gauges = None
        if isinstance(config.telemetry.prometheus, RayMetrics):
            from streamppo.telemetry.tracking.ray_metrics import RayGauges

            self._gauges = RayGauges(self._folder.name)

    def line(self, line: Line) -> None:
        """Set Ray's gauges for a line. The trackers' processes read the line from metrics.jsonl."""
        if self._gauges is not None:
            self._gauges.line(line)

    def check(self) -> None:
        """Log a warning, once, for each tracker whose process has ended early."""
        for kind, child in list(self._processes.items()):
            if child.poll() is not None:
                self._give_up(kind, self._reason(kind))

    def close(self) -> None:
        """Let all trackers send the remaining lines, and kill each that takes too long. Later calls do nothing."""
        for child in self._processes.values():
            _close_input(child)
        deadline = time.monotonic() + END_S
        for kind, child in list(self._processes.items()):
            try:
                code = child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._give_up(kind, f"it did not send the last lines within {END_S:g} s")
                continue
            if code:
                self._give_up(kind, self._reason(kind))
        self._processes = {}

    def _start(self, run: TrackedRun) -> "subprocess.Popen[bytes]":
        """Start a tracker in a separate session: Ctrl-C must not end it before it has sent the last lines."""
        path = self._log(run.kind)
        for folder in (path.parent, process.progress_path(self._folder, run.kind).parent):
            folder.mkdir(exist_ok=True)
        with path.open("wb") as output:
            command = [sys.executable, "-m", process.__name__]
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        with suppress(BrokenPipeError):
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(run) + b"\n")
            child.stdin.flush()
        return child

    def _give_up(self, kind: Kind, reason: str) -> None:
        child = self._processes.pop(kind)
        # The process group includes processes that the library started.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        _close_input(child)
        log.warning("%s has ended, the run continues without it: %s; see %s", kind, reason, self._log(kind))

    def _reason(self, kind: Kind) -> str:
        with suppress(OSError):
            lines = self._log(kind).read_text(errors="replace").strip().splitlines()
            hung = any(text.startswith(HANGS) for text in lines)
            return "it did not answer in time" if hung else " ".join(lines[-1:]) or "its process has ended"
        return "its process has ended"

    def _log(self, kind: Kind) -> Path:
        return self._folder / "logs" / f"{kind}.log"


def _close_input(child: "subprocess.Popen[bytes]") -> None:
    if child.stdin is not None:
        with suppress(BrokenPipeError):
            child.stdin.close()


def runs(config: Config, folder: Path) -> list[TrackedRun]:
    """Return a `TrackedRun` for each tracker that has its own process."""
    telemetry, values = config.telemetry, diff.fields(config)
    tracked = [TrackedRun(kind, str(folder), telemetry.project, values) for kind in telemetry.trackers]
    if isinstance(telemetry.prometheus, Endpoint):
        tracked.append(TrackedRun("prometheus", str(folder), telemetry.project, {}, telemetry.prometheus.port))
    return tracked
