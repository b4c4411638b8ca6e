"""The live line: one line in its place on a terminal of any width, a logged line now and then anywhere else."""

import fcntl
import logging
import os
import pty
import select
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import pytest

from streamppo import process
from streamppo.telemetry import live
from streamppo.telemetry.live import LiveLine

TEXT = "[   1.0s] update    1/1000  reward 0.123  entropy 1.234  ess 0.987  lag 0.50  learner waits 3%"


@contextmanager
def terminal() -> Iterator[int]:
    """Standard output is a terminal of 40 columns; its other end."""
    reader, writer = pty.openpty()
    resize(writer, 40)
    # Within the test itself: pytest gives standard output another file between a fixture and its test.
    with os.fdopen(writer, "w") as stdout, redirect_stdout(stdout):
        yield reader
    os.close(reader)


def resize(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def written(reader: int) -> str:
    """Everything that was written: a terminal hands it over a moment later, and not always at once."""
    text = b""
    while select.select([reader], [], [], 0.5)[0]:
        text += os.read(reader, 10_000)
    return text.decode()


def test_a_line_is_rewritten_in_its_place_and_never_wraps() -> None:
    with terminal() as reader:
        line = LiveLine()
        line.show(TEXT, last=False)
        line.show(TEXT.upper(), last=False)
        shown = written(reader)
        assert shown == f"{process.CLEAR_LINE}{TEXT[:39]}{process.CLEAR_LINE}{TEXT.upper()[:39]}"
        resize(sys.stdout.fileno(), 60)
        line.show(TEXT, last=False)
        assert written(reader) == process.CLEAR_LINE + TEXT[:59]


def test_a_terminal_of_unknown_width_gets_the_whole_line() -> None:
    with terminal() as reader:
        resize(sys.stdout.fileno(), 0)
        LiveLine().show(TEXT, last=False)
        assert written(reader) == process.CLEAR_LINE + TEXT


def test_the_last_state_stays_and_an_error_begins_below_it() -> None:
    with terminal() as reader:
        line = LiveLine()
        line.show("update 1", last=False)
        line.close()
        line.close()
        assert written(reader) == f"{process.CLEAR_LINE}update 1\r\n"


def test_without_a_terminal_a_line_is_logged_now_and_then_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="streamppo")
    monkeypatch.setattr(logging.getLogger("streamppo"), "propagate", True)
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    line = LiveLine()
    for second in range(1, 31):
        clock[0] = second
        line.show(f"update {second}", last=second == 30)
    line.close()
    assert caplog.messages == ["update 11", "update 22", "update 30"]
    assert capsys.readouterr().out == ""
