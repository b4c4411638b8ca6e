"""Amounts over time, and a timeline's later part: every token is drawn once."""

import re

import pytest

from streamppo.telemetry.report import plot
from streamppo.telemetry.report.plot import Curve, Event, Histogram

TITLE = re.compile(r"<title>update (\d+), lag (\d+\+?): ([\d,]+) \(([\d.]+)%\)</title>")


def test_the_shares_of_a_column_are_told_and_coloured() -> None:
    drawn = plot.heat_map([Histogram(1, {0: 30, 2: 10}), Histogram(2, {1: 5}), Histogram(3, {})], "update", "lag")
    assert TITLE.findall(drawn) == [("1", "0", "30", "75.0"), ("1", "2", "10", "25.0"), ("2", "1", "5", "100.0")]
    assert re.findall(r'fill-opacity="([\d.]+)"', drawn) == ["0.75", "0.25", "1.00"]


def test_many_columns_are_summed_and_high_rows_share_the_last_one() -> None:
    columns = [Histogram(x, {0: 1, 15: 1, 16: 1, 300: 1}) for x in range(1, 1001)]
    found = TITLE.findall(plot.heat_map(columns, "update", "lag"))
    assert len({x for x, *_ in found}) <= plot.MOST_COLUMNS
    assert sum(int(amount.replace(",", "")) for *_, amount, _ in found) == 4000
    assert {row for _, row, *_ in found} == {"0", "15", "16+"}
    assert found[-1][0] == "1000"


def test_without_an_amount_nothing_is_drawn() -> None:
    assert plot.heat_map([], "update", "lag") == plot.heat_map([Histogram(1, {0: 0})], "update", "lag") == ""


def test_a_timeline_from_a_later_second_leaves_out_what_was_before() -> None:
    events = [Event("a", 0, 4, "past"), Event("a", 4, 12, "across"), Event("b", 15, 20, "pale", strength=0.25)]
    drawn = plot.timeline(events, 10.0)
    assert re.findall(r"<title>(\w+)</title>", drawn) == ["across", "pale"]
    across = re.search(r'x="([\d.]+)"[^>]*width="([\d.]+)"[^>]*><title>across', drawn)
    assert across is not None and float(across[1]) == 84.0
    assert 'fill-opacity="0.25"><title>pale' in drawn


def points_of(drawn: str, form: str) -> int:
    found = re.search(rf'<polyline class="c0{form}"[^>]* points="([^"]*)"', drawn)
    return len(found[1].split()) if found else 0


def test_teeth_are_pale_behind_their_mean_and_a_smooth_curve_is_drawn_as_it_is() -> None:
    teeth = plot.curves([Curve("x", [(float(x), float(x % 2)) for x in range(100)])], "update")
    assert points_of(teeth, " raw") == points_of(teeth, "") == 100
    assert teeth.count("data-label") == 1, "the pointer reads the values, not their means"
    heights = [float(place.split(",")[1]) for place in re.findall(r'"c0" points="([^"]*)"', teeth)[0].split()]
    assert max(heights) - min(heights) < 0.3 * (plot.HEIGHT - plot.TOP - plot.BOTTOM)
    smooth = plot.curves([Curve("x", [(float(x), float(x)) for x in range(100)])], "update")
    assert points_of(smooth, " raw") == 0 and points_of(smooth, "") == 100


@pytest.mark.parametrize(("count", "form"), [(1, " loose"), (2, " loose"), (3, " few"), (11, " few"), (12, "")])
def test_two_points_are_two_dots_and_no_trend(count: int, form: str) -> None:
    drawn = plot.curves([Curve("x", [(float(x), float(x)) for x in range(count)])], "update")
    assert points_of(drawn, form) == count
    assert drawn.count("<circle") == (count if count < 12 else 0)


def test_a_curve_that_ends_before_the_others_has_a_dot_where_what_is_known_ends() -> None:
    long, short = ([(float(x), 1.0 + x) for x in range(end)] for end in (50, 20))
    drawn = plot.curves([Curve("long", long), Curve("short", short, 1)], "seconds", "ms")
    (place,) = re.findall(r'<circle class="fill c1" cx="([\d.]+)"', drawn)
    assert float(place) == pytest.approx(plot.LEFT + 19 / 49 * (plot.WIDTH - plot.LEFT - plot.RIGHT), abs=0.1)
    assert ">seconds</text>" in drawn and ">ms</text>" in drawn


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([0, 0, 0, 1], ["reward 0: 3 (75.0%)", "reward 1: 1 (25.0%)"]),
        ([0.5], ["reward 0.5: 1 (100.0%)"]),
        ([0, 1, 10], ["reward 0: 1 (33.3%)", "reward 1: 1 (33.3%)", "reward 10: 1 (33.3%)"]),
        ([float("nan")], []),
    ],
)
def test_a_histogram_has_its_values_at_their_places(values: list[float], told: list[str]) -> None:
    assert re.findall(r"<title>([^<]*)</title>", plot.histogram(values, "reward", "trajectories")) == told


def test_a_histogram_of_many_values_has_equal_parts_in_which_each_is_counted_once() -> None:
    drawn = plot.histogram([number / 1000 for number in range(1001)], "reward", "trajectories")
    counts = [int(count) for count in re.findall(r": (\d+) \(", drawn)]
    assert len(counts) == plot.PARTS and sum(counts) == 1001
    boxes = [
        (float(x), float(wide))
        for x, wide in re.findall(r'<rect class="fill c0" x="([\d.]+)"[^>]*width="([\d.]+)"', drawn)
    ]
    assert len({wide for _, wide in boxes}) <= 2 and boxes[0][0] >= plot.LEFT and sum(boxes[-1]) <= plot.WIDTH
