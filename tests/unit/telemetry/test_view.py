"""The live view as text: it fits any terminal, tells the truth, and obeys nothing that a completion says."""

import unicodedata
from collections.abc import Callable

import pytest
from live_states import NASTY, busy, empty, engine, update
from rich.text import Text

from streamppo.config.sections import Config
from streamppo.telemetry.diagnosis import Diagnosis, Sign
from streamppo.telemetry.live.drawing import bar, curve, seconds, truncate
from streamppo.telemetry.live.state import MOST_MEANS, CurveValues
from streamppo.telemetry.live.view import final_rows, view
from streamppo.telemetry.progress import ScoredVersion
from streamppo.terminal import harmless

SIZES = [
    (columns, rows) for columns in (1, 20, 59, 60, 61, 80, 119, 120, 160, 300) for rows in (1, 2, 7, 8, 15, 24, 50)
]


def texts(rows: list[Text]) -> list[str]:
    return [row.plain.rstrip() for row in rows]


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("versions", [0, 1, 40])
def test_no_row_is_wider_than_the_terminal_and_there_are_no_more_of_them(
    columns: int, rows: int, versions: int
) -> None:
    for state in (busy(versions), empty()):
        for found in (view(state, columns, rows), final_rows(state, columns)):
            assert all(row.cell_len < columns for row in found)
            assert not [one for row in found for one in row.plain if unicodedata.category(one)[0] == "C"]
        assert 1 <= len(view(state, columns, rows)) <= max(1, rows - 1)


def test_everything_is_there_at_80_by_24() -> None:
    found = texts(view(busy(completion="46"), 80, 24))
    labels = ["update", "reward", "held-out", "entropy", "ess", "lag", "queue", "waiting", "speed", "memory"]
    told = {row.split(" ")[0]: row for row in found if row[0] != " "}
    assert list(told) == ["math", *labels, "warning", "sample", "Ctrl-C:"]
    assert "40/100" in told["update"] and " 40%" in told["update"] and "2:00 left" in told["update"]
    assert told["reward"].startswith("reward    0.400   ") and told["reward"].endswith("█  0.01..0.40")
    assert told["held-out"].startswith("held-out  0.200   ") and told["held-out"].endswith("█  0.05..0.20  v40")
    assert [part for part in told["lag"].split() if part[-1] == "%"] == ["25%", "50%", "24%", "0%", "0%"]
    assert "128 of 512 ready" in told["queue"] and "320 being sampled" in told["queue"]
    assert told["waiting"] == "waiting   learner 25%, engines 10%: learner for engines"
    assert told["speed"] == "speed     200 tokens/s sampled  500 trained  2 s an update"
    assert told["memory"] == "memory    5.0 of 16.0 GiB on this machine  1 restart"
    assert told["sample"] == "sample    12+34= → 46  reward 1  v39"


def test_of_few_rows_the_most_important_ones_are_left_and_below_that_one_line() -> None:
    found = texts(view(busy(), 60, 9))
    assert [row.split(" ")[0] for row in found] == [
        *["update", "reward", "held-out", "lag", "queue", "waiting", "warning", "sample"]
    ]
    assert texts(view(busy(), 80, 7)) == texts(view(busy(), 59, 24)) == ["[ 102.0s] update   40/100  reward 0.400"]
    assert texts(view(empty(), 59, 24)) == [""]


def test_a_wide_terminal_has_curves_on_the_left_and_the_pipeline_on_the_right() -> None:
    found = texts(view(busy(), 160, 50))
    assert len(found) <= 38
    reward = next(row for row in found if row.startswith("reward"))
    assert "lag       0 " in reward
    assert any(row.startswith("length") for row in found) and any("queue     128" in row for row in found)
    assert found[found.index(reward) + 1].lstrip()[0] in "▁▂▃▄▅▆▇█", "the curve has several rows"


def test_a_run_that_has_not_begun_says_what_it_waits_for_and_nothing_else() -> None:
    state = empty()
    state.doing = "loading the model"
    found = texts(view(state, 80, 24))
    assert [row.split(" ")[0] for row in found] == ["math", "update", "Ctrl-C:"]
    assert "0/100" in found[1] and found[1].endswith("0%  loading the model")


@pytest.mark.parametrize(("columns", "rows"), [(80, 30), (80, 50), (110, 70), (160, 40), (300, 90)])
def test_curves_take_the_rows_and_the_columns_that_are_there(columns: int, rows: int) -> None:
    found = texts(view(busy(completion="46"), columns, rows))
    assert len(found) >= min(rows * 3 // 4, 40) - 5, "rows are left that a curve could have"
    held_out = next(row for row in found if row.startswith("held-out"))
    room = (columns - 5) // 2 if columns >= 120 else columns - 1
    assert held_out[:room].rstrip().endswith("v40") and len(held_out[:room].rstrip()) >= room - 5


def test_held_out_accuracy_is_a_curve_over_versions_from_three_evaluations_on() -> None:
    def drawn(*versions: int) -> str:
        state = empty()
        state.held_out = [ScoredVersion(version, version / 100, 256) for version in versions]
        return next(row for row in texts(final_rows(state, 80)) if row.startswith("held-out"))

    assert "▁█  " in drawn(0, 100) and "▁▄█  " not in drawn(0, 50, 100)
    assert drawn(0, 10, 100).split()[2] == drawn(0, 50, 100).split()[2], (
        "a straight line is one wherever its points are"
    )


@pytest.mark.parametrize(("outcome", "is_told"), [("finished", False), ("RunError: a stall\x1b[2J", True)])
def test_a_failed_run_says_so_in_its_last_rows_in_red(outcome: str, is_told: bool) -> None:
    state = busy()
    state.add({"end": outcome, "wall_s": 103.0})
    rows = final_rows(state, 80)
    assert (texts(rows)[-1] == "ended     RunError: a stall·[2J") is is_told
    styles = {str(span.style) for row in rows for span in row.spans}
    assert ("red" in styles) is ("bold red" in styles) is is_told


def test_a_sign_that_is_over_leaves_the_row_of_warnings(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = empty()
    state.diagnosis = Diagnosis(math_config())
    sign = Sign("entropy collapse", "0.01", "raise it", 20, 40)
    state.warn("entropy collapse: 0.01: raise it")
    for holds in (True, False):
        monkeypatch.setattr(Diagnosis, "findings", {sign.name: sign._replace(holds=holds)})
        assert any(row.startswith("warning   entropy collapse") for row in texts(view(state, 80, 24))) is holds


def test_markup_and_control_characters_are_shown_and_not_obeyed() -> None:
    found = texts(view(busy(), 300, 24))
    sample = next(row for row in found if row.startswith("sample"))
    assert sample.startswith("sample    12+34= → x = [red]1[/red]⏎·[2J·· # 答え: 42 日本語") and sample.endswith("v39")
    warning = next(row for row in found if row.startswith("warning"))
    assert "[bold]learner-0[/bold]: killed by the kernel, out of memory·[31m" in warning
    assert harmless("a\r\nb\tc\x00\ud800\u200b") == "a⏎b c···"
    assert "[bold]" not in " ".join(str(span.style) for row in view(busy(), 80, 24) for span in row.spans)


def test_a_long_prompt_shows_its_end_and_leaves_the_completion_the_half_of_the_row() -> None:
    state = busy()
    assert state.sampled
    state.sampled = {**state.sampled, "prompt": "word " * 60 + "how many?", "completion": "y" * 300}
    sample = next(row for row in texts(view(state, 80, 24)) if row.startswith("sample"))
    assert " how many? → yyyyyyyyyyyyyyyyyyyyyyyy" in sample and sample.startswith("sample    …")


def test_after_a_signal_the_view_says_how_to_end_at_once() -> None:
    state = busy()
    assert texts(view(state, 80, 24))[-1] == "Ctrl-C: save a last checkpoint and end; twice: end at once"
    state.stopping = True
    found = texts(view(state, 80, 24))
    assert found[-1] == "stopping: a last checkpoint is saved; Ctrl-C: end at once"
    assert any(row.startswith("update") and row.endswith("stopping") for row in found)


def test_the_last_state_is_at_most_five_rows_with_the_time_that_it_took() -> None:
    state = busy()
    state.doing = ""
    found = texts(final_rows(state, 80))
    assert [row.split(" ")[0] for row in found] == ["update", "reward", "held-out", "waiting", "warning"]
    assert found[0].endswith("40%  1:42")


def test_a_resumed_run_has_the_curves_of_the_parts_before_and_the_pace_of_this_one() -> None:
    state = busy()
    state.add({"part": 2, "wall_s": 200.0, "version": 40})
    assert len(state.curves["reward"].means) == 40 and state.seconds_left is None and state.engines_idle is None
    state.add(update(41, 1000.0))
    state.add(update(42, 1003.0))
    assert state.seconds_left == pytest.approx(58 * 3.0)


def test_speeds_are_of_the_time_between_two_reports_and_an_engine_that_has_died_has_none() -> None:
    state = empty()
    state.add(engine("rollout-0", 1000, 10.0, 10.0))
    assert state.sampled_per_s == pytest.approx(100)
    state.add(engine("rollout-0", 5000, 20.0, 20.0))
    state.add(engine("rollout-1", 500, 10.0, 20.0))
    assert state.sampled_per_s == pytest.approx(450)
    state.add({"restart": "rollout", "wall_s": 21.0, "reason": "it was killed"})
    assert state.sampled_per_s is None


def test_curves_and_bars_have_the_cells_that_they_were_given() -> None:
    assert curve([], 10) == [""] and curve([0.3], 10) == ["▄"] and curve([1, 1, 1], 10) == ["▄▄▄"]
    assert curve([0, 1], 10) == ["▁█"] and curve(list(range(8)), 8) == ["▁▂▃▄▅▆▇█"]
    assert curve([0, 1, 2], 9, 2) == [" ▁█", "▁██"]
    assert curve(list(range(1000)), 4) == ["▁▃▆█"]
    assert curve([0.1 + 0.2, 0.3], 4) == ["▄▄"]
    assert [bar(share, 4) for share in (0, 0.5, 0.53, 1, 2, -1)] == ["", "██", "██▏", "████", "████", ""]
    assert [seconds(value) for value in (7, 754, 10_930, 191_410)] == ["0:07", "12:34", "3:02:10", "2 d 05:10"]
    assert (
        truncate("日本語", 5) == "日本…"
        and truncate("日本語", 4) == "日 …"
        and truncate("abc", 3) == "abc"
        and truncate("abc", 0) == ""
    )
    assert truncate(NASTY * 1000, 10).startswith("x = [red]1"[:9])


def test_a_narrow_range_is_shown_with_the_digits_that_differ() -> None:
    state = busy()
    state.curves["ess"] = CurveValues.of([0.991, 0.994])
    told = {row.split(" ")[0]: row for row in texts(view(state, 80, 24))}
    assert told["ess"].endswith("0.991..0.994")


@pytest.mark.parametrize("count", [MOST_MEANS - 1, MOST_MEANS, 10 * MOST_MEANS])
def test_a_curve_of_any_length_is_drawn_from_a_bounded_number_of_means(count: int) -> None:
    values = CurveValues()
    for number in range(count):
        values.append(float(number))
        values.append(float("nan"))
    assert (values.newest, values.low, values.high) == (count - 1, 0, count - 1)
    assert MOST_MEANS / 2 <= len(values.means) < MOST_MEANS or count < MOST_MEANS
    assert curve(values.means, 4) == curve(list(range(count)), 4)
