"""The process of one tracker: it sends what metrics.jsonl says, until its standard input ends.

    opening -> following <-> sending -> closing -> ended (0)
    any of them -> an error of the library: ended (1), its traceback in the log
    all but following -> longer than its limit: ended (1), the place where it hangs in the log

Standard input begins with the `Run` in a line, and ends when the driver ends, however that happens. The driver's own
limit at its end is `CLOSE_S`; the limit here is for a driver that is not there any more.
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
from streamppo.telemetry.tracking.follow import ResumedReader
from streamppo.telemetry.tracking.points import Points
from streamppo.telemetry.tracking.trackers.build import build
from streamppo.telemetry.tracking.trackers.run import Kind, TrackedRun, Tracker

POLL_S = 1.0
"""Seconds between two looks at the file."""
OPEN_S, SEND_S, CLOSE_S = 120.0, 60.0, 20.0
"""Limits: the library's import and its begin, one hand-over of points, and all that is left to do at the end."""
NICENESS = 10
STDIN = 0


class Progress(msgspec.Struct, frozen=True):
    """The content of trackers/KIND.json: bytes of metrics.jsonl that are sent, the newest version, the tracker's id."""

    id: str = ""
    sent: int = 0
    version: int = 0


def main() -> None:
    """Follow the run of the first line of standard input."""
    os.nice(NICENESS)
    run = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrackedRun)
    follow(run)
    sys.stderr.flush()
    # Libraries may wait for a server when Python ends.
    os._exit(0)


def follow(run: TrackedRun) -> None:
    """Send everything that comes, and close the tracker when standard input has ended."""
    path = progress_path(Path(run.folder), run.kind)
    progress = msgspec.json.decode(path.read_bytes(), type=Progress) if path.is_file() else Progress()
    with _limit(OPEN_S):
        tracker = build(structs.replace(run, id=progress.id))
    follower, points = ResumedReader(Path(run.folder), progress.sent), Points(progress.version)
    _save(path, Progress(tracker.id, follower.sent, points.version))
    while not _has_ended(POLL_S):
        with _limit(SEND_S):
            if _send(tracker, follower, points):
                _save(path, Progress(tracker.id, follower.sent, points.version))
    with _limit(CLOSE_S):
        while _send(tracker, follower, points):
            _save(path, Progress(tracker.id, follower.sent, points.version))
        tracker.close(points.outcome)


def progress_path(folder: Path, kind: Kind) -> Path:
    """The file that says how far a tracker of the run in `folder` has come."""
    return folder / "trackers" / f"{kind}.json"


def _send(tracker: Tracker, follower: ResumedReader, points: Points) -> bool:
    """Send the next lines; False if there are none."""
    before, look = follower.sent, follower.look()
    if found := list(points.make(look.lines, look.written_s)):
        tracker.send(found)
    return follower.sent != before


def _save(path: Path, progress: Progress) -> None:
    # It is not flushed: that would cost the queue's journal its time. After a power cut some lines are sent again.
    durable.aside(path).write_bytes(msgspec.json.encode(progress))
    os.replace(durable.aside(path), path)


def _has_ended(wait_s: float) -> bool:
    """Wait so long, or until standard input has ended; the driver writes nothing more to it."""
    return bool(select.select([STDIN], [], [], wait_s)[0])


@contextmanager
def _limit(seconds: float) -> Generator[None]:
    """End the process if the block takes longer: by a thread that no library can keep from running."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
