"""The driver's side of trackers: it starts their processes, checks them, and waits for them for `END_S` at its end.

    running -> lost      its process has ended: one warning, with the reason from its log
            -> late      at the end it has not ended within `END_S`: killed, one warning
            -> ended

A resumed run sends the lines that a tracker lacks; they are in metrics.jsonl.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamppo.config import diff
from streamppo.config.sections import Config, Endpoint, RayMetrics
from streamppo.telemetry.metrics_file import Line
from streamppo.telemetry.tracking import process
from streamppo.telemetry.tracking.trackers.run import Kind, TrackedRun

if TYPE_CHECKING:
    from streamppo.telemetry.tracking.ray_metrics import RayGauges

END_S = process.CLOSE_S
"""Seconds that a run waits for all its trackers at its end."""
HANGS = "Timeout ("
"""The beginning of faulthandler's lines about a timeout."""

log = logging.getLogger(__name__)


class Sinks:
    """The trackers of the run in `folder` according to `config`."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._folder = folder.resolve()
        self._processes: dict[Kind, subprocess.Popen[bytes]] = {
            run.kind: self._start(run) for run in runs(config, self._folder)
        }
        self._gauges = _gauges(config, self._folder.name)

    def line(self, line: Line) -> None:
        """Set Ray's gauges from an event of the run; the processes read it from the file."""
        if self._gauges is not None:
            self._gauges.line(line)

    def check(self) -> None:
        """Warn about trackers whose process has ended."""
        for kind, child in list(self._processes.items()):
            if child.poll() is not None:
                self._give_up(kind, self._reason(kind))

    def close(self) -> None:
        """Let all trackers send the remaining lines, and kill the late ones. Later calls do nothing."""
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
        """Start a process in its own session: Ctrl-C reaches only the driver, which lets the process finish."""
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
        # The group includes the library's own processes.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        _close_input(child)
        log.warning("%s has ended, the run continues without it: %s; see %s", kind, reason, self._log(kind))

    def _reason(self, kind: Kind) -> str:
        """The reason from the log of an ended process: its error, or that it hung."""
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
    """A `TrackedRun` of the run in `folder` for every tracker with a process of its own."""
    telemetry, values = config.telemetry, diff.fields(config)
    tracked = [TrackedRun(kind, str(folder), telemetry.project, values) for kind in telemetry.trackers]
    if isinstance(telemetry.prometheus, Endpoint):
        tracked.append(TrackedRun("prometheus", str(folder), telemetry.project, {}, telemetry.prometheus.port))
    return tracked


def _gauges(config: Config, name: str) -> "RayGauges | None":
    if not isinstance(config.telemetry.prometheus, RayMetrics):
        return None
    from streamppo.telemetry.tracking.ray_metrics import RayGauges

    return RayGauges(name)
