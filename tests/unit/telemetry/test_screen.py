"""Rows at the bottom of a terminal: drawn in their place, never torn by lines of anybody, gone with the terminal."""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from live_states import busy, empty, update
from terminal import resize, shown, terminal, written

from streamppo import process
from streamppo.config.sections import Config
from streamppo.telemetry.live import display as displays
from streamppo.telemetry.live.display import LiveView, PlainLines, display
from streamppo.telemetry.live.screen import Screen, ScreenRow

ROWS = [ScreenRow("first row", 9), ScreenRow("second row", 10)]


def rows(*texts: str) -> list[ScreenRow]:
    return [ScreenRow(text, len(text)) for text in texts]


def test_rows_are_drawn_again_in_their_place_and_stay_at_the_end() -> None:
    with terminal() as reader:
        screen = Screen()
        screen.draw(rows("one", "two", "three"))
        screen.draw(rows("1", "2"))
        screen.draw(rows("I", "II", "III"))
        screen.leave()
        print("after")
        assert shown(written(reader), 40) == ["I", "II", "III", "after", ""]


def test_lines_of_any_thread_and_of_the_log_appear_above_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("streamppo"), "handlers", [])
    process.log_to_stdout()
    with terminal() as reader:
        screen = Screen()
        screen.draw(ROWS)

        def chatter(name: str) -> None:
            for number in range(20):
                print(f"{name} says", number)

        threads = [threading.Thread(target=chatter, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        logging.getLogger("streamppo.loop").info("ours")
        screen.draw(ROWS)
        for thread in threads:
            thread.join()
        sys.stdout.write("two\nlines\nand a beginning")
        screen.leave()
        found = shown(written(reader), 40)
    above, end = found[:-4], found[-4:]
    assert end == ["and a beginning", "first row", "second row", ""]
    for name in "ab":
        assert [line for line in above if line.startswith(name)] == [f"{name} says {number}" for number in range(20)]
    assert {"ours", "two", "lines"} < set(above) and len(above) == 43


def test_a_terminal_that_became_narrower_has_wrapped_the_rows_and_keeps_the_lines_above() -> None:
    with terminal() as reader:
        screen = Screen()
        print("above")
        screen.draw(rows("x" * 39, "y" * 39))
        resize(sys.stdout.fileno(), 20)
        screen.draw(rows("short"))
        # The two rows have become four.
        assert "\x1b[3A" in written(reader)


def test_a_signal_writes_at_once_and_waits_for_no_writer_that_it_has_interrupted() -> None:
    with terminal() as reader:
        screen = Screen()
        screen.draw(ROWS)
        screen.say("stopping\n")
        assert shown(written(reader), 40) == ["stopping", "first row", "second row"]
        with screen._lock:
            screen.say("later\n")
        assert written(reader) == ""
        screen.draw(ROWS)
        assert "later" in written(reader)


def test_a_terminal_that_goes_away_stops_nothing() -> None:
    with terminal() as reader:
        screen = Screen()
        screen.draw(ROWS)
        written(reader)
        os.close(reader)
        screen.draw(ROWS)
        print("nobody reads this")
        screen.say("nor this\n")
        screen.leave()


def test_standard_error_that_is_a_file_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal():
        before = sys.stderr
        screen = Screen()
        screen.draw(ROWS)
        assert sys.stderr is before and sys.stdout is not screen.terminal
        screen.leave()
        assert sys.stdout is screen.terminal


def test_a_display_is_chosen_by_standard_output_and_its_environment(
    math_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = math_config()
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(display(config, tmp_path), PlainLines)
    with terminal():
        view = display(config, tmp_path)
        assert isinstance(view, LiveView)
        view.close()
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(display(config, tmp_path), PlainLines)


def drawn(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    """The bytes of a view that was drawn once."""
    monkeypatch.setenv("TERM", "xterm-256color")
    with terminal(columns) as reader:
        view = LiveView(busy(completion="46"))
        view.tick("update 41", 102.0)
        found = written(reader)
        view.close()
        return found


def test_no_colour_means_the_view_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", drawn(monkeypatch, 80))
    monkeypatch.setenv("NO_COLOR", "1")
    found = drawn(monkeypatch, 80)
    assert "reward" in found and not re.search(r"\x1b\[[0-9;]*[349][0-9]m", found)


def test_a_terminal_narrower_than_60_columns_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(drawn(monkeypatch, 30), 30) == ["[ 102.0s] update   40/100  re"]


def test_it_is_drawn_twice_a_second_at_most_and_once_a_second_while_nothing_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, drawings = [1000.0], [0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: clock[0])
    with terminal(80):
        view = LiveView(empty())
        monkeypatch.setattr(view, "_draw", lambda rows: drawings.__setitem__(0, drawings[0] + 1))
        for hundredth in range(1000):
            clock[0] = 1000 + hundredth / 100
            view.line(update(1, 1.0))
            view.tick("update 1", 1.0)
        assert drawings == [20]
        for hundredth in range(1000, 2000):
            clock[0] = 1000 + hundredth / 100
            view.tick("update 1", 1.0)
        assert drawings[0] <= 31
        view.close()


def test_the_newest_warning_of_the_driver_is_shown_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with terminal(80) as reader:
        view = LiveView(empty())
        logging.getLogger("streamppo.somewhere").warning("rewards fall\nand more of it")
        logging.getLogger("streamppo.somewhere").info("no warning")
        view.tick("update 1", 3.0)
        view.close()
        logging.getLogger("streamppo.somewhere").warning("after the end")
        assert shown(written(reader), 80)[-2].startswith("warning   rewards fall  0:0")


def test_a_fault_in_the_view_ends_no_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("streamppo"), "propagate", True)
    caplog.set_level(logging.INFO, logger="streamppo")
    with terminal(80):
        view = LiveView(empty())
        monkeypatch.setattr(displays, "view", lambda *_: 1 / 0)
        view.tick("update 1", 3.0)
        view.tick("update 1", 9.0)
        view.update("update 2", is_last=True)
    assert [message for message in caplog.messages if "view" in message] == [
        "the live view has failed; the run continues with plain lines"
    ]
    assert "update 2" in caplog.messages


def test_without_a_terminal_a_line_is_logged_now_and_then_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="streamppo")
    monkeypatch.setattr(logging.getLogger("streamppo"), "propagate", True)
    clock = [0.0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: clock[0])
    plain = PlainLines()
    for second in range(1, 31):
        clock[0] = second
        plain.line(update(second, float(second)))
        plain.update(f"update {second}", is_last=second == 30)
        plain.tick("update", float(second))
    plain.close()
    assert caplog.messages == ["update 11", "update 22", "update 30"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        (("queue.max_lag=3",), "3"),
        (("queue.max_lag={kind='adaptive', at_most=9, ess=0.5}",), "9"),
        (("queue.max_lag=3", "queue.admission='mean'", "queue.too_old='keep'"), "3 in the mean"),
    ],
)
def test_the_view_says_whether_each_lag_is_bounded_or_the_mean(
    math_config: Callable[..., Config], settings: tuple[str, ...], bound: str
) -> None:
    assert displays.empty_state(math_config(*settings), Path()).lag_bound == bound
