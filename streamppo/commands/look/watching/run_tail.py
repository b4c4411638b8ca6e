"""Follows a run by polling its folder. Each line of metrics.jsonl is read once."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from streamppo.commands.look.summary import condition_of
from streamppo.config import file as configfile
from streamppo.driver import report, run_folder
from streamppo.errors import RunError
from streamppo.telemetry.diagnosis import Diagnosis
from streamppo.telemetry.live.display import empty_state
from streamppo.telemetry.live.state import RunState
from streamppo.telemetry.metrics_file import Line, LineReader
from streamppo.telemetry.record import read_summary
from streamppo.telemetry.report.view import NamedNumber, View
from streamppo.telemetry.watch.sections import RunView
from streamppo.types import QueueReport

JOURNAL_S = 10.0
"""Minimum time between two reads of the journal. A read loads all waiting trajectories."""
AHEAD = 2
"""Updates by which the journal of a run in progress may be ahead of metrics.jsonl."""


class CurveSource(Protocol):
    """A run or a replay whose curves the page shows; `tag` reads new content, and changes if the content does."""

    def tag(self) -> str: ...

    def run_view(self) -> RunView:
        """Return the state at the last call of `tag`."""
        ...


class WatchedRun:
    """The run in `folder`, which the page calls `name`. The view has notes about parts that cannot be read."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._lines = LineReader(folder)
        self._begun = 0
        self._journal_at = -JOURNAL_S
        self._queue_numbers: tuple[QueueReport | None, Sequence[NamedNumber]] = (None, ())
        self._num_changes = 0
        self._condition = ""
        self.view = View(name, [])
        self._config_ns = -1
        self._load_config()

    def tag(self) -> str:
        """Read the new lines, a changed configuration, and the journal at most every `JOURNAL_S`."""
        is_running = report.try_part(self.view, self._is_running)
        self._load_config()
        self._read()
        known = is_running is not None
        self._condition = condition_of(self.view, is_running=is_running) if known else self.view.outcome
        is_due = time.monotonic() - self._journal_at >= JOURNAL_S and not self._is_early
        if self._state.version and is_due:
            self._look_into_journal()
            self._read()
        if not self._is_early:
            self._show_journal()
        return f"{self._begun}-{len(self.view.lines)}-{self._num_changes}-{self._condition}"

    def run_view(self) -> RunView:
        return RunView(self.view, self._state, self._condition)

    def _load_config(self) -> None:
        """Load the configuration if its file is new (a resume and `scale` change it), and count all lines again."""
        path, written_ns = self._folder / configfile.CONFIG, 0
        with suppress(OSError):
            written_ns = path.stat().st_mtime_ns
        # A folder that is gone is shown as it was.
        if written_ns == self._config_ns or (self._config_ns > 0 and not written_ns):
            return
        self._config_ns, self.view.notes, self._journal_at = written_ns, [], -JOURNAL_S
        self.config = report.try_part(self.view, lambda: configfile.load(path))
        self._notes = list(self.view.notes)
        self.view.config = configfile.show(self.config) if self.config else ""
        self._num_changes += 1
        self._begin()
        report.try_part(self.view, lambda: self._count(self._lines.content.lines))

    def _begin(self) -> None:
        config, name = self.config, self.view.name
        self._state = empty_state(config, self._folder) if config else RunState(name, str(self._folder), 0, "", 0)
        self._diagnosis = Diagnosis(config) if config else None

    def _read(self) -> None:
        if new := report.try_part(self.view, self._lines.read):
            report.try_part(self.view, lambda: self._take(new))

    def _take(self, new: Sequence[Line]) -> None:
        if self._lines.times_begun != self._begun:
            self._begun = self._lines.times_begun
            self._begin()
        self.view.lines = self._lines.content.lines
        self.view.summary = report.try_part(self.view, lambda: read_summary(self._folder))
        self._count(new)

    def _count(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._state.add(line)
            if self._diagnosis is not None:
                self._diagnosis.add(line)
                if "end" in line:
                    self._diagnosis.close(self.view.summary)
        self.view.findings = list(self._diagnosis.findings.values()) if self._diagnosis else ()

    def _look_into_journal(self) -> None:
        self._journal_at = time.monotonic()
        before, self.view.notes = self.view.notes, [*self._notes, *self._lines.content.damage]
        if (config := self.config) is not None:
            # If the journal cannot be read, the previous numbers are kept.
            counters = report.try_part(self.view, lambda: report.read_counters(config, self._folder, self.view.notes))
            self._queue_numbers = counters or self._queue_numbers
        self._num_changes += self.view.notes != before

    @property
    def _is_early(self) -> bool:
        """True if the journal that was read last is slightly ahead of the lines."""
        queue, _ = self._queue_numbers
        ahead = queue.version - self._state.version if queue else 0
        return 0 < ahead <= AHEAD and self._condition == "running"

    def _show_journal(self) -> None:
        queue, failures = self._queue_numbers
        before = self.view.queue, self.view.failures
        self.view.queue, self.view.failures = queue or self.view.queue, failures or self.view.failures
        self._num_changes += (self.view.queue, self.view.failures) != before

    def _is_running(self) -> bool | None:
        try:
            return run_folder.is_running(self._folder)
        except RunError:
            # The lock of another user's folder cannot be opened.
            return None


class WatchedReplay:
    """The updates in a report of `streamppo replay`. Raises `RunError` for other files."""

    def __init__(self, path: Path) -> None:
        self._view = report.replay_view(path)

    def tag(self) -> str:
        return ""

    def run_view(self) -> RunView:
        return RunView(self._view, RunState(self._view.name, "", 0, "", 0), "replayed")
