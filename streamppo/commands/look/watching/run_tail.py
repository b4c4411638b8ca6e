"""Follows a run: polls its folder, and reads each line of metrics.jsonl once."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from streamppo.commands.look.summary import condition
from streamppo.config import file as configfile
from streamppo.driver import report
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
"""Least time between two reads of the journal, which read all waiting trajectories."""
AHEAD = 2
"""Updates by which the journal of a running run may be ahead of metrics.jsonl."""


class CurveSource(Protocol):
    """A run or a replay, with curves."""

    def tag(self) -> str:
        """Check for changes; returns a tag that changes with them."""
        ...

    def run_view(self) -> RunView:
        """The run as it was when `tag` was called last."""
        ...


class WatchedRun:
    """The run in `folder`, called `name`. Unreadable parts are named, and the others shown."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._lines = LineReader(folder)
        self._begun = 0
        self._journal_at = -JOURNAL_S
        self._found: tuple[QueueReport | None, Sequence[NamedNumber]] = (None, ())
        self._looks = 0
        self._condition = ""
        self.view = View(name, [])
        self.config = report.try_part(self.view, lambda: configfile.load(folder / configfile.CONFIG))
        self._notes = list(self.view.notes)
        self.view.config = configfile.show(self.config) if self.config else ""
        self._begin()

    def tag(self) -> str:
        """Read the new lines, and the journal at intervals."""
        self._read()
        self._condition = report.try_part(self.view, self._state_of_driver) or self.view.outcome
        is_due = time.monotonic() - self._journal_at >= JOURNAL_S and not self._is_early
        if self._state.version and is_due:
            self._look_into_journal()
            self._read()
        if not self._is_early:
            self._show_journal()
        return f"{self._begun}-{len(self.view.lines)}-{self._looks}-{self._condition}"

    def run_view(self) -> RunView:
        """The run as it was when `tag` was called last."""
        return RunView(self.view, self._state, self._condition)

    def _begin(self) -> None:
        """Forget the lines of an earlier file."""
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
        for line in new:
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
            # Without a journal the earlier numbers stay.
            counters = report.try_part(self.view, lambda: report.read_counters(config, self._folder, self.view.notes))
            self._found = counters or self._found
        self._looks += self.view.notes != before

    @property
    def _is_early(self) -> bool:
        """True while the journal is ahead of the lines."""
        queue, _ = self._found
        ahead = queue.version - self._state.version if queue else 0
        return 0 < ahead <= AHEAD and self._condition == "running"

    def _show_journal(self) -> None:
        queue, failures = self._found
        before = self.view.queue, self.view.failures
        self.view.queue, self.view.failures = queue or self.view.queue, failures or self.view.failures
        self._looks += (self.view.queue, self.view.failures) != before

    def _state_of_driver(self) -> str:
        try:
            return condition(self._folder, self.view)
        except RunError:
            # A folder of another user cannot be locked.
            return self.view.outcome


class WatchedReplay:
    """The updates of a file of `streamppo replay --set`, for comparison. Raises `RunError` for another file."""

    def __init__(self, path: Path) -> None:
        self._view = report.replay_view(path)

    def tag(self) -> str:
        """Return a constant: a replay never changes."""
        return ""

    def run_view(self) -> RunView:
        """The replay."""
        return RunView(self._view, RunState(self._view.name, "", 0, "", 0), "replayed")
