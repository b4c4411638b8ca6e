"""Drawings made of characters in a given number of cells: curves, bars."""

from collections.abc import Sequence
from itertools import pairwise

from rich.cells import cell_len, set_cell_size

EIGHTHS = " ▁▂▃▄▅▆▇█"
"""Eighths of a cell, filled from below."""
LEFT_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
"""Eighths of a cell, filled from the left."""


def curve(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """Draw `values` over time into `height` rows of at most `width` cells, scaled from smallest to largest.

    If there are more values than cells, neighbours are averaged. The smallest value has an eighth of a cell, so that it
    is visible.
    """
    if not values or width < 1:
        return [""] * height
    means = _average(values, width)
    low, high = min(means), max(means)
    steps = 8 * height - 1
    # Means of equal numbers may differ by rounding.
    span = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else 0.0
    levels = [1 + round(steps * (mean - low) / span) if span else 4 * height for mean in means]
    return ["".join(EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(height))]


def bar(share: float, width: int) -> str:
    """Draw a bar of length `share` * `width` cells, rounded to an eighth of a cell, without padding."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + LEFT_EIGHTHS[eighths % 8]


def seconds(value: float) -> str:
    """Format seconds: 0:07, 12:34, 3:02:10, 2 d 05:10."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def truncate(text: str, width: int) -> str:
    """Truncate `text` to `width` cells, with … at the end if it was longer."""
    if width < 1:
        return ""
    # Bounds the work on a very long text.
    if len(text) > 4 * width:
        text = text[: 4 * width]
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _average(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    ends = [len(values) * place // width for place in range(width + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(ends)]
