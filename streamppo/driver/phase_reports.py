"""The phases of queue and engines (streamppo/process.py), asked for now and then while a run goes on."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from streamppo.driver.crew import Seat
from streamppo.driver.watch import Calls, Stage
from streamppo.process import Spent
from streamppo.telemetry.record import PHASES_S
from streamppo.types import EngineReport, QueueReport, decode

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor


class PhaseReports:
    """Gives `write` the name of a process and the time of its phases."""

    def __init__(
        self, queue: "ActorProxy[QueueActor]", calls: Calls, write: Callable[[str, Mapping[str, Spent]], None]
    ) -> None:
        self._queue = queue
        self._calls = calls
        self._write = write
        self._asked = time.monotonic()

    def check(self, seats: Sequence[Seat]) -> None:
        """Ask the queue and the rollout actors at work, if it is time."""
        if time.monotonic() - self._asked < PHASES_S:
            return
        self._asked = time.monotonic()

        def of_queue(answer: bytes) -> None:
            self._write("queue", decode(answer, QueueReport).phases)

        def of_engine(answer: bytes) -> None:
            report = decode(answer, EngineReport)
            self._write(report.actor, report.phases)

        self._calls.watch(self._queue.report.remote(), Stage.QUEUE, of_queue)
        for seat in seats:
            self._calls.watch(seat.actor.report.remote(), Stage.ROLLOUT, of_engine, name=seat.name)
