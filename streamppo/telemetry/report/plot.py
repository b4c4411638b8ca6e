"""Draws charts as SVG; the page's script reads values from `data-box`. bokeh would need 2 s of CPU and 1.3 MB."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

WIDTH, HEIGHT = 480.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 18.0, 20.0
MOST_POINTS = 400
"""Maximum number of points of a curve. If a curve has more values, each point is the mean of several values."""
MOST_COLUMNS = 120
"""Maximum number of columns of a heat map. If more histograms are given, each column is the sum of several."""
PARTS = 16
"""Number of equal bins of a histogram."""
NAME = 64.0
"""The width reserved for the name of the x axis."""
MOST_ROWS = 16
"""A heat map has a row for each number up to `MOST_ROWS`. The top row also counts all larger numbers."""
TICKS, X_TICKS = 4, 6
FEW = 12
"""A curve with fewer points has a dot at each point."""
TREND = 3
"""A curve with fewer points has no line between its points."""
LEAST_SMOOTHED, SAW_TOOTH = 30, 0.04
"""A curve is jagged if it has at least `LEAST_SMOOTHED` points, and the mean distance of a point from the middle of its
two neighbours exceeds the share `SAW_TOOTH` of the curve's height."""
Point = tuple[float, float]


class Curve(NamedTuple):
    """A named line through points. `colour` is an index of the page's style."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    dashed: bool = False

    @property
    def is_flat(self) -> bool:
        return all(y == self.points[0][1] for _, y in self.points)


class Bar(NamedTuple):
    """A named amount."""

    label: str
    amount: float
    colour: int = 0


class Event(NamedTuple):
    """A time interval with a text, drawn in a lane of a timeline. `strength` is the opacity of its colour, 0 to 1."""

    lane: str
    begin_s: float
    end_s: float
    text: str
    colour: int = 0
    strength: float = 1.0


class Histogram(NamedTuple):
    """The amount of each whole number at position `x`, for example the tokens of each lag at update 10."""

    x: float
    amounts: Mapping[int, int]


def curves(all_curves: Sequence[Curve], x_name: str, unit: str = "") -> Markup:
    """Draw curves over one x axis; empty without points. A jagged curve is pale, with its running mean over it."""
    all_curves = [
        curve._replace(points=_thin_out([(x, y) for x, y in curve.points if math.isfinite(y)])) for curve in all_curves
    ]
    if not any(curve.points for curve in all_curves):
        return Markup("")
    xs = [x for curve in all_curves for x, _ in curve.points]
    ys = [y for curve in all_curves for _, y in curve.points]
    x_axis, y_axis = _Axis(*_wide(min(xs), max(xs)), LEFT, WIDTH - RIGHT), _y_axis(ys)
    drawn = [part for curve in all_curves if curve.points for part in _curve(curve, x_axis, y_axis)]
    box = " ".join(f"{value:.10g}" for value in (*x_axis[:2], *y_axis[:2]))
    return _svg(
        [*_rules(y_axis), *_marks(x_axis), *_names(x_name, unit), *drawn],
        f'class="curves" data-box="{box}" data-frame="{LEFT} {WIDTH - RIGHT} {HEIGHT - BOTTOM} {TOP}" '
        f'data-x="{escape(x_name)}"',
    )


def bars(all_bars: Sequence[Bar], unit: str) -> Markup:
    """Draw the bars side by side. `unit` says what the amounts and the labels are."""
    total = sum(bar.amount for bar in all_bars)
    if not total:
        return Markup("")
    y_axis = _Axis(0.0, max(bar.amount for bar in all_bars), HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / len(all_bars)
    every = math.ceil(len(all_bars) / 12)
    drawn: list[str] = []
    for number, bar in enumerate(all_bars):
        left, top = LEFT + (number + 0.1) * step, y_axis.place(bar.amount)
        size = f'width="{0.8 * step:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
        title = f"<title>{escape(bar.label)}: {bar.amount:,g} ({bar.amount / total:.1%})</title>"
        drawn.append(f'<rect class="fill c{bar.colour}" x="{left:.1f}" y="{top:.1f}" {size}>{title}</rect>')
        if number % every == 0:
            drawn.append(_text(left + 0.4 * step, HEIGHT - 6, bar.label, "middle"))
    return _svg([*_rules(y_axis), *_names("", unit), *drawn], 'class="bars"')


def histogram(values: Sequence[float], x_name: str, unit: str) -> Markup:
    """Draw a histogram over a linear axis: a bar for each distinct value if they are few, otherwise equal bins."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return Markup("")
    low, high = min(values), max(values)
    distinct = sorted(set(values))
    width = min((b - a for a, b in pairwise(distinct)), default=1.0)
    if len(distinct) > PARTS or high - low > PARTS * width:
        width = (high - low) / PARTS
        places = [low + (min(PARTS - 1, int((value - low) / width)) + 0.5) * width for value in values]
    else:
        places = values
    counts = Counter(places)
    x_axis = _Axis(min(counts) - width / 2, max(counts) + width / 2, LEFT, WIDTH - RIGHT)
    y_axis = _Axis(0.0, max(counts.values()), HEIGHT - BOTTOM, TOP)
    drawn: list[str] = []
    for place, count in sorted(counts.items()):
        left, right, top = x_axis.place(place - 0.45 * width), x_axis.place(place + 0.45 * width), y_axis.place(count)
        box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
        where = f"{place:.4g}" if places is values else f"{place - width / 2:.4g} to {place + width / 2:.4g}"
        text = f"{x_name} {where}: {count:,} ({count / len(values):.1%})"
        drawn.append(f'<rect class="fill c0" {box}><title>{escape(text)}</title></rect>')
    return _svg([*_rules(y_axis), *_marks(x_axis), *_names(x_name, unit), *drawn], 'class="bars"')


def heat_map(columns: Sequence[Histogram], x_name: str, y_name: str) -> Markup:
    """Draw each histogram as a column of a heat map. A cell with a larger share of its column is more opaque."""
    columns = _merge_bins([distribution for distribution in columns if sum(distribution.amounts.values()) > 0])
    if not columns:
        return Markup("")
    highest = min(MOST_ROWS, max(max(distribution.amounts) for distribution in columns))
    x_axis = _Axis(*_wide(columns[0].x, columns[-1].x), LEFT, WIDTH - RIGHT)
    wide, high = (WIDTH - RIGHT - LEFT) / len(columns), (HEIGHT - BOTTOM - TOP) / (highest + 1)
    drawn: list[str] = []
    for place, column in enumerate(columns):
        total = sum(column.amounts.values())
        for row, amount in _rows(column, highest).items():
            left, top = LEFT + place * wide, HEIGHT - BOTTOM - (row + 1) * high
            box = f'x="{left:.1f}" y="{top:.1f}" width="{wide + 0.05:.2f}" height="{high:.1f}"'
            text = f"{x_name} {column.x:g}, {y_name} {_row_name(row, highest)}: {amount:,g} ({amount / total:.1%})"
            drawn.append(
                f'<rect class="fill c0" {box} fill-opacity="{amount / total:.2f}"><title>{escape(text)}</title></rect>'
            )
    marks = _marks(x_axis)
    every = math.ceil((highest + 1) / 8)
    names = [
        _text(LEFT - 5, HEIGHT - BOTTOM - (row + 0.5) * high + 3.5, _row_name(row, highest), "end")
        for row in range(0, highest + 1, every)
    ]
    return _svg([*drawn, *marks, *names, *_names(x_name, y_name)], 'class="heat"')


def timeline(events: Sequence[Event], begin_s: float = 0.0) -> Markup:
    """Draw the events in their lanes, over the seconds of the run from `begin_s` on."""
    events = [event._replace(begin_s=max(begin_s, event.begin_s)) for event in events if event.end_s >= begin_s]
    if not events:
        return Markup("")
    lanes, left, width = list(dict.fromkeys(event.lane for event in events)), 84.0, 960.0
    height = 26.0 * len(lanes)
    axis = _Axis(*_wide(begin_s, max(event.end_s for event in events)), left, width - RIGHT)
    drawn: list[str] = []
    for tick in _ticks(axis):
        drawn += [
            _line(axis.place(tick), 0, axis.place(tick), height),
            _text(axis.place(tick), height + 14, f"{tick:g} s", "middle"),
        ]
    drawn += [_text(left - 6, 26 * number + 17, lane, "end") for number, lane in enumerate(lanes)]
    for event in events:
        begin, end = axis.place(event.begin_s), axis.place(event.end_s)
        place = (
            f'x="{begin:.1f}" y="{26 * lanes.index(event.lane) + 5}" width="{max(1.5, end - begin):.1f}" height="16"'
        )
        strength = f' fill-opacity="{event.strength:.2f}"' if event.strength < 1 else ""
        title = f"<title>{escape(event.text)}</title>"
        drawn.append(f'<rect class="fill c{event.colour}" {place}{strength}>{title}</rect>')
    return _svg(drawn, 'class="timeline"', width, height + 20)


# --- parts of a chart ----------------------------------------------------------------------------------------


class _Axis(NamedTuple):
    low: float
    high: float
    begin: float
    end: float

    def place(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def _y_axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    # A nearly constant curve far from zero is not stretched to the whole height.
    room = max(0.05 * (high - low), 0.01 * max(abs(low), abs(high)))
    return _Axis(*_wide(0.0 if 0 <= low < high / 2 else low - room, high + room), HEIGHT - BOTTOM, TOP)


def _wide(low: float, high: float) -> Point:
    return (low, high) if high > low else (low, low + 1.0)


def _thin_out(points: Sequence[Point]) -> list[Point]:
    size = math.ceil(len(points) / MOST_POINTS)
    parts = [points[begin : begin + size] for begin in range(0, len(points), size)] if size > 1 else []
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts] or list(points)


def _merge_bins(columns: Sequence[Histogram]) -> list[Histogram]:
    size = max(1, math.ceil(len(columns) / MOST_COLUMNS))
    merged: list[Histogram] = []
    for begin in range(0, len(columns), size):
        sums: Counter[int] = Counter()
        for column in columns[begin : begin + size]:
            sums.update(column.amounts)
        merged.append(Histogram(columns[min(begin + size, len(columns)) - 1].x, sums))
    return merged


def _rows(column: Histogram, highest: int) -> dict[int, int]:
    rows: Counter[int] = Counter()
    for row, amount in column.amounts.items():
        rows[min(row, highest)] += amount
    return {row: amount for row, amount in sorted(rows.items()) if amount}


def _row_name(row: int, highest: int) -> str:
    return f"{row}+" if row == highest == MOST_ROWS else f"{row}"


def _ticks(axis: _Axis, count: int = TICKS) -> list[float]:
    rough = (axis.high - axis.low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(axis.low / step), math.floor(axis.high / step)
    # In floating point 3 * 0.1 is not 0.3.
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def _marks(x_axis: _Axis) -> list[str]:
    """Return the numbers below the x axis. The right end is left free for the axis's name."""
    places = [(x_axis.place(tick), abbreviate(tick)) for tick in _ticks(x_axis, X_TICKS)]
    return [_text(x, HEIGHT - 5, text, "middle") for x, text in places if x < WIDTH - NAME]


def _names(x_name: str, unit: str) -> list[str]:
    return [_text(WIDTH - RIGHT, HEIGHT - 5, x_name, "end"), _text(2, 11, unit, "start")]


def _rules(y_axis: _Axis) -> list[str]:
    drawn: list[str] = []
    for tick in _ticks(y_axis):
        y = y_axis.place(tick)
        drawn += [_line(LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 5, y + 3.5, abbreviate(tick), "end")]
    return drawn


def abbreviate(number: float) -> str:
    """Shorten a number: 1234567 -> 1.23M; a number below 10,000 has four digits."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{number:.4g}"


def _curve(curve: Curve, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    """Draw a curve, the running mean of a jagged curve, and dots for few points or for an early end."""
    points, kind = curve.points, f"c{curve.colour}{' dashed' if curve.dashed else ''}"
    smooth = _smooth(points)
    form = " raw" if smooth else " loose" if len(points) < TREND else " few" if len(points) < FEW else ""
    drawn = [_polyline(points, x_axis, y_axis, f'class="{kind}{form}" data-label="{escape(curve.label)}"')]
    if smooth:
        drawn.append(_polyline(smooth, x_axis, y_axis, f'class="{kind}"'))
    ends_early = points[-1][0] < x_axis.high
    dots = points if len(points) < FEW else (smooth or points)[-1:] if ends_early else []
    return drawn + [
        f'<circle class="fill c{curve.colour}" cx="{x_axis.place(x):.1f}" cy="{y_axis.place(y):.1f}" r="2.5"/>'
        for x, y in dots
    ]


def _polyline(points: Sequence[Point], x_axis: _Axis, y_axis: _Axis, attributes: str) -> str:
    places = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.2f}" for x, y in points)
    return f'<polyline {attributes} points="{places}"/>'


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Return the running mean of a jagged curve; empty for a smooth curve."""
    ys = [y for _, y in points]
    if len(ys) < LEAST_SMOOTHED:
        return []
    teeth = sum(abs(2 * y - before - after) for before, y, after in zip(ys, ys[1:], ys[2:], strict=False)) / 2
    if teeth / (len(ys) - 2) <= SAW_TOOTH * (max(ys) - min(ys)):
        return []
    half = max(3, len(ys) // 25)
    parts = [ys[max(0, place - half) : place + half + 1] for place in range(len(ys))]
    return [(x, sum(part) / len(part)) for (x, _), part in zip(points, parts, strict=True)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(drawn: Sequence[str], attributes: str, width: float = WIDTH, height: float = HEIGHT) -> Markup:
    return Markup(f'<svg viewBox="0 0 {width:g} {height:g}" role="img" {attributes}>{"".join(drawn)}</svg>')
