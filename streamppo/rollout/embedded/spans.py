"""Divides the rows of a step into one or two spans, so that a few long rows do not lengthen the attention of all rows.

Attention in a span reads, for each row, as many positions as the span's longest row has.
Example: rows of 512, 16, 16 and 16 tokens are read at 4 * 512 positions in one span, and at 512 + 3 * 16 in two.
"""

from typing import NamedTuple

import numpy as np

ROUND = 16
"""The number of positions of a span is rounded up to a multiple of this, so that tensors have few different shapes."""
LEAST_ROWS = 16
"""From this number of rows on, one thread of MKL computes all rows of a float32 product by the same kernel."""
SHORT = 2 * ROUND
"""If no row is longer than this, there is one span, because two would save nothing."""
MOST_SHARE = 0.75
"""Two spans are made if they read at most this fraction of the positions of one span."""


class Span(NamedTuple):
    """Rows `first` to `end - 1`; none has more than `longest` positions."""

    first: int
    end: int
    longest: int


def divide(lengths: np.ndarray, max_positions: int) -> list[Span]:
    """Divide rows with these `lengths` [B], in this order, into one span, or two if two read far fewer positions."""
    single = Span(0, len(lengths), int(_round_up(lengths.max(), max_positions)))
    if len(lengths) < 2 or single.longest <= SHORT:
        return [single]
    before, after = np.maximum.accumulate(lengths), np.maximum.accumulate(lengths[::-1])[::-1]
    ends = np.arange(1, len(lengths))
    longest_before, longest_after = _round_up(before[:-1], max_positions), _round_up(after[1:], max_positions)
    costs = ends * longest_before + ends[::-1] * longest_after
    best = int(costs.argmin())
    if costs[best] > MOST_SHARE * cost([single]):
        return [single]
    end = best + 1
    return [Span(0, end, int(longest_before[best])), Span(end, len(lengths), int(longest_after[best]))]


def move_long_rows_first(lengths: np.ndarray, max_positions: int) -> tuple[np.ndarray, list[Span]]:
    """Return the rows to move to the front, and the spans after the move; no rows if one span is cheap enough."""
    order = np.argsort(-lengths, kind="stable")
    spans = divide(lengths[order], max_positions)
    return order[: spans[0].end] if len(spans) > 1 else order[:0], spans


def cost(spans: list[Span]) -> int:
    """Return the number of positions that attention reads, over all rows."""
    return sum((span.end - span.first) * span.longest for span in spans)


def width(length: int) -> int:
    """Return the padded width of a text. Vector instructions add 16 entries at once, so rounding depends on it."""
    return length if length <= ROUND else -(-length // ROUND) * ROUND


def _round_up(lengths: np.ndarray, max_positions: int) -> np.ndarray:
    return np.minimum(-(-lengths // ROUND) * ROUND, max_positions)
