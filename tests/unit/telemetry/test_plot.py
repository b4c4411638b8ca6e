"""Amounts over time, and a timeline's later part: every token is drawn once."""

import re

from streamppo.telemetry.report import plot
from streamppo.telemetry.report.plot import Column, Event

TITLE = re.compile(r"<title>update (\d+), lag (\d+\+?): ([\d,]+) \(([\d.]+)%\)</title>")


def test_the_shares_of_a_column_are_told_and_coloured() -> None:
    drawn = plot.heat([Column(1, {0: 30, 2: 10}), Column(2, {1: 5}), Column(3, {})], "update", "lag")
    assert TITLE.findall(drawn) == [("1", "0", "30", "75.0"), ("1", "2", "10", "25.0"), ("2", "1", "5", "100.0")]
    assert re.findall(r'fill-opacity="([\d.]+)"', drawn) == ["0.75", "0.25", "1.00"]


def test_many_columns_are_summed_and_high_rows_share_the_last_one() -> None:
    columns = [Column(x, {0: 1, 15: 1, 16: 1, 300: 1}) for x in range(1, 1001)]
    found = TITLE.findall(plot.heat(columns, "update", "lag"))
    assert len({x for x, *_ in found}) <= plot.MOST_COLUMNS
    assert sum(int(amount.replace(",", "")) for *_, amount, _ in found) == 4000
    assert {row for _, row, *_ in found} == {"0", "15", "16+"}
    assert found[-1][0] == "1000"


def test_without_an_amount_nothing_is_drawn() -> None:
    assert plot.heat([], "update", "lag") == plot.heat([Column(1, {0: 0})], "update", "lag") == ""


def test_a_timeline_from_a_later_second_leaves_out_what_was_before() -> None:
    events = [Event("a", 0, 4, "past"), Event("a", 4, 12, "across"), Event("b", 15, 20, "pale", strength=0.25)]
    drawn = plot.timeline(events, 10.0)
    assert re.findall(r"<title>(\w+)</title>", drawn) == ["across", "pale"]
    across = re.search(r'x="([\d.]+)"[^>]*width="([\d.]+)"[^>]*><title>across', drawn)
    assert across is not None and float(across[1]) == 84.0
    assert 'fill-opacity="0.25"><title>pale' in drawn
