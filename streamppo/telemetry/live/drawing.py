"""Draws curves and bars of characters in a given number of terminal cells."""

from collections.abc import Sequence
from itertools import pairwise

from rich.cells import cell_len, set_cell_size

EIGHTHS = " ▁▂▃▄▅▆▇█"
"""Characters of a cell that is filled from below by 0 to 8 eighths."""
LEFT_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
"""Characters of a cell that is filled from the left by 0 to 7 eighths."""


def curve(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """Draw `values`, averaged if there are too many, as a curve of `height` rows and at most `width` cells."""
    if not values or width < 1:
        return [""] * height
    means = _average(values, width)
    low, high = min(means), max(means)
    steps = 8 * height - 1
    # The means of equal numbers may differ by rounding errors.
    span = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else 0.0
    levels = [1 + round(steps * (mean - low) / span) if span else 4 * height for mean in means]
    return ["".join(EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels) for row in reversed(range(height))]


def bar(share: float, width: int) -> str:
    """Draw a bar of `share` * `width` cells, rounded to an eighth of a cell and without padding."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + LEFT_EIGHTHS[eighths % 8]


def seconds(value: float) -> str:
    """Format seconds as 0:07, 12:34, 3:02:10 or 2 d 05:10."""
    minutes, remainder_s = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{remainder_s:02d}" if hours else f"{minutes}:{remainder_s:02d}"


def truncate(text: str, width: int) -> str:
    """Shorten `text` to `width` cells, with … at the end if anything was cut off."""
    if width < 1:
        return ""
    # `cell_len` would take long for a very long text.
    if len(text) > 4 * width:
        text = text[: 4 * width]
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _average(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    ends = [len(values) * place // width for place in range(width + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(ends)]
