"""Polls the reports of the queue and the engines during a run."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamppo.driver.watch.rollout_pool import RolloutHandle
from streamppo.driver.watch.watch import RunStage, WatchedCalls
from streamppo.telemetry.record import RunRecord
from streamppo.types import EngineReport, QueueReport, decode

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor


class ReportPolling:
    """Passes the reports of queue and rollout actors to `record`, every `display.reports_s`."""

    def __init__(self, queue: "ActorProxy[QueueActor]", calls: WatchedCalls, record: RunRecord) -> None:
        self._queue = queue
        self._calls = calls
        self._record = record
        self._asked = time.monotonic()

    def check(self, seats: Sequence[RolloutHandle]) -> None:
        """Request reports of the queue and the rollout actors `seats` if they are due."""
        if time.monotonic() - self._asked < self._record.display.reports_s:
            return
        self._asked = time.monotonic()

        def of_queue(answer: bytes) -> None:
            self._record.queue(decode(answer, QueueReport))

        def of_engine(answer: bytes) -> None:
            self._record.engine(decode(answer, EngineReport))

        self._calls.watch(self._queue.report.remote(), RunStage.QUEUE, of_queue)
        for seat in seats:
            self._calls.watch(seat.actor.report.remote(), RunStage.ROLLOUT, of_engine, name=seat.name)
