"""The driver's periodic requests: for the names of silent actors, and for reports of the queue and the engines.

A silent actor is alive for Ray but sends no heartbeat: it is stopped, or in a function that does not return. Heartbeats
are sent every `BEAT_S`, concurrently with the actor's work. If the queue or the driver was stopped, actors get time to
send a heartbeat before they count as silent.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from ray.actor import ActorProxy

from streamppo.driver.watch.rollout_pool import RolloutHandle
from streamppo.driver.watch.watch import RunStage, WatchedCalls
from streamppo.queue.actor import QueueActor
from streamppo.telemetry.record import RunRecord
from streamppo.types import EngineReport, QueueReport, decode


class Heartbeats:
    """Calls `on_silence(name, reason)` for every actor whose last heartbeat is more than `limit_s` old."""

    def __init__(
        self,
        queue: "ActorProxy[QueueActor]",
        calls: WatchedCalls,
        on_silence: Callable[[str, str], None],
        limit_s: float,
    ) -> None:
        self._queue = queue
        self._calls = calls
        self._on_silence = on_silence
        self._limit_s = limit_s
        self._checked = self._called = time.monotonic()
        self._is_asked = False

    def check(self, actors: Sequence[str]) -> None:
        """Ask the queue which of `actors` are silent, but not soon after a pause in which the driver was stopped."""
        present = time.monotonic()
        if present - self._called > self._limit_s / 4:
            self._checked = present
        self._called = present
        # Only one request is pending at a time. A stopped queue would answer several requests at once when it
        # continues, and the newest answer would not be late.
        if self._is_asked or present - self._checked < self._limit_s / 4:
            return
        self._checked, self._is_asked = present, True

        def report_silent(silent: list[str]) -> None:
            self._is_asked = False
            # A late answer is ignored: the queue was stopped, and has not read the heartbeats sent meanwhile.
            if time.monotonic() - present < self._limit_s / 4:
                for name in silent:
                    self._on_silence(name, f"silent for more than {self._limit_s:g} s")

        self._calls.watch(self._queue.silent.remote(list(actors), self._limit_s), RunStage.QUEUE, report_silent)


class ReportPolling:
    """Passes the reports of the queue and the rollout actors to `record`, every `display.reports_s` seconds."""

    def __init__(self, queue: "ActorProxy[QueueActor]", calls: WatchedCalls, record: RunRecord) -> None:
        self._queue = queue
        self._calls = calls
        self._record = record
        self._requested = time.monotonic()

    def check(self, handles: Sequence[RolloutHandle]) -> None:
        if time.monotonic() - self._requested < self._record.display.reports_s:
            return
        self._requested = time.monotonic()

        self._calls.watch(
            self._queue.report.remote(), RunStage.QUEUE, lambda answer: self._record.queue(decode(answer, QueueReport))
        )
        for handle in handles:
            read = partial(self._read_engine_report, handle)
            self._calls.watch(handle.actor.report.remote(), RunStage.ROLLOUT, read, name=handle.name)

    def _read_engine_report(self, handle: RolloutHandle, answer: bytes) -> None:
        report = decode(answer, EngineReport)
        # The time limits of a start and of a stall follow one another.
        if handle.is_starting and not report.is_starting:
            self._calls.reset_stall()
        handle.is_starting = report.is_starting
        self._record.engine(report)
