"""The process of one tracker: it sends the lines of metrics.jsonl until its standard input ends.

    opening -> following <-> sending -> closing -> ended (exit code 0)
    any state -> the library raises: ended (exit code 1), with a traceback in the log
    any state except following -> the time limit passes: ended (exit code 1), with the hanging stack in the log

The first line of standard input is the `TrackedRun`. Standard input ends when the driver ends, for any reason. This
process then has `CLOSE_S` to send the remaining lines. The driver waits for this process, unless the driver was killed.
"""

import faulthandler
import os
import select
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import structs

from streamppo import durable
from streamppo.errors import UNREADABLE
from streamppo.telemetry.metrics_file import Line, Tail, parse
from streamppo.telemetry.tracking.points import Points
from streamppo.telemetry.tracking.trackers.run import Kind, TrackedRun, Tracker

MOST_BYTES = 2**20
"""Approximate number of bytes of one read. A long file is read in several parts, to save memory."""
POLL_S = 1.0
OPEN_S, SEND_S, CLOSE_S = 120.0, 60.0, 20.0
"""Time limits: for importing and opening the library, for one `send`, and for all work at the end."""
NICENESS = 10
STDIN = 0


class Progress(msgspec.Struct, frozen=True):
    """The content of trackers/KIND.json: the library's id of the run, the bytes sent, and the newest version sent."""

    id: str = ""
    sent: int = 0
    version: int = 0


def main() -> None:
    """Send the lines of the run that the first line of standard input describes."""
    os.nice(NICENESS)
    run = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrackedRun)
    follow(run)
    sys.stderr.flush()
    # At a normal exit a library may wait for its server.
    os._exit(0)


def follow(run: TrackedRun) -> None:
    """Send the lines of the run as they are written. When standard input has ended, send the rest and close."""
    path = progress_path(Path(run.folder), run.kind)
    progress = _read(path)
    with _limit(OPEN_S):
        tracker = _open_tracker(structs.replace(run, id=progress.id))
    tail, points = Tail(Path(run.folder), progress.sent), Points(progress.version)
    _save(path, Progress(tracker.id, tail.end, points.version))
    # The driver writes only one line, so standard input is readable from then on only if it has ended.
    while not select.select([STDIN], [], [], POLL_S)[0]:
        with _limit(SEND_S):
            _send(path, tracker, tail, points)
    with _limit(CLOSE_S):
        while _send(path, tracker, tail, points):
            pass
        tracker.close(points.outcome)


def _read(path: Path) -> Progress:
    """Return the progress of an earlier process. If the file is missing or damaged, all lines are sent again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Progress) if path.is_file() else Progress()
    except (OSError, *UNREADABLE) as error:
        # A power failure may leave an empty file.
        sys.stderr.write(f"{path}: cannot be read, so all lines are sent again: {error}\n")
        return Progress()


def progress_path(folder: Path, kind: Kind) -> Path:
    """Return the path of a tracker's progress file in the run's `folder`."""
    return folder / "trackers" / f"{kind}.json"


def _open_tracker(run: TrackedRun) -> Tracker:
    match run.kind:
        case "tensorboard":
            from streamppo.telemetry.tracking.trackers.tensorboard_tracker import TensorBoard

            return TensorBoard(run)
        case "wandb":
            from streamppo.telemetry.tracking.trackers.wandb_tracker import WeightsAndBiases

            return WeightsAndBiases(run)
        case "trackio":
            from streamppo.telemetry.tracking.trackers.trackio_tracker import Trackio

            return Trackio(run)
        case "mlflow":
            from streamppo.telemetry.tracking.trackers.mlflow_tracker import MLflow

            return MLflow(run)
        case "prometheus":
            from streamppo.telemetry.tracking.trackers.endpoint import PrometheusEndpoint

            return PrometheusEndpoint(run)


def _send(path: Path, tracker: Tracker, tail: Tail, points: Points) -> bool:
    """Send the next lines and save the progress. Returns False if there are no new lines."""
    before, lines = tail.end, read_lines(tail)
    if new_points := list(points.make(lines, tail.written_s)):
        tracker.send(new_points)
    if tail.end != before:
        _save(path, Progress(tracker.id, tail.end, points.version))
    return tail.end != before


def read_lines(tail: Tail) -> list[Line]:
    """Read the next complete lines, of about `MOST_BYTES` bytes together, and skip damaged lines."""
    return [line for text in tail.read(MOST_BYTES) if (line := parse(text))]


def _save(path: Path, progress: Progress) -> None:
    # The file is not flushed, because that would slow down the queue's journal. After a power failure some lines are
    # sent again.
    durable.aside(path).write_bytes(msgspec.json.encode(progress))
    os.replace(durable.aside(path), path)


@contextmanager
def _limit(seconds: float) -> Generator[None]:
    """End the process if the block takes longer than `seconds`, even if a library hangs: the timer is a C thread."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
