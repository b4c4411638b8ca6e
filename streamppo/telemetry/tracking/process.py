"""The process of one tracker: it sends the lines of metrics.jsonl until its standard input ends.

    opening -> following <-> sending -> closing -> ended (0)
    any state -> an error of the library: ended (1), its traceback in the log
    any state but following -> over its time limit: ended (1), with the hanging stack in the log

The first line of standard input is the `TrackedRun`; standard input ends when the driver ends, for whatever reason. The
driver itself waits `CLOSE_S` at its end; the limit here is needed when the driver is gone.
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
from streamppo.telemetry.tracking.follow import ResumedReader
from streamppo.telemetry.tracking.points import Points
from streamppo.telemetry.tracking.trackers.build import build
from streamppo.telemetry.tracking.trackers.run import Kind, TrackedRun, Tracker

POLL_S = 1.0
"""Seconds between two reads of the file."""
OPEN_S, SEND_S, CLOSE_S = 120.0, 60.0, 20.0
"""Time limits: the library's import and start, one call of `send`, and all remaining work at the end."""
NICENESS = 10
STDIN = 0


class Progress(msgspec.Struct, frozen=True):
    """The content of trackers/KIND.json: the tracker's id, the sent bytes of metrics.jsonl, and the newest version."""

    id: str = ""
    sent: int = 0
    version: int = 0


def main() -> None:
    """Follow the run given in the first line of standard input."""
    os.nice(NICENESS)
    run = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrackedRun)
    follow(run)
    sys.stderr.flush()
    # At a normal exit a library may wait for its server.
    os._exit(0)


def follow(run: TrackedRun) -> None:
    """Send all lines, and close the tracker once standard input has ended."""
    path = progress_path(Path(run.folder), run.kind)
    progress = _read(path)
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


def _read(path: Path) -> Progress:
    """The progress of an earlier process. Without one, or with a damaged file, all lines are sent."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Progress) if path.is_file() else Progress()
    except (OSError, *UNREADABLE) as error:
        # A power failure may leave an empty file.
        sys.stderr.write(f"{path}: cannot be read, so all lines are sent again: {error}\n")
        return Progress()


def progress_path(folder: Path, kind: Kind) -> Path:
    """The progress file of a tracker of the run in `folder`."""
    return folder / "trackers" / f"{kind}.json"


def _send(tracker: Tracker, follower: ResumedReader, points: Points) -> bool:
    """Send the next lines; False if there are none."""
    before, look = follower.sent, follower.look()
    if new_points := list(points.make(look.lines, look.written_s)):
        tracker.send(new_points)
    return follower.sent != before


def _save(path: Path, progress: Progress) -> None:
    # Not flushed, which would slow the queue's journal down; after a power cut some lines are sent again.
    durable.aside(path).write_bytes(msgspec.json.encode(progress))
    os.replace(durable.aside(path), path)


def _has_ended(wait_s: float) -> bool:
    """Wait for `wait_s` or the end of standard input; the driver writes only its first line."""
    return bool(select.select([STDIN], [], [], wait_s)[0])


@contextmanager
def _limit(seconds: float) -> Generator[None]:
    """End the process if the block takes longer, from a C thread that a hanging library cannot block."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
