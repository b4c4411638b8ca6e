"""The rows of a step in one or two spans: few long completions do not make every other row's attention long.

Attention of a span looks at as many places, in each of its rows, as the longest of them has.
"""

from typing import NamedTuple

import numpy as np

ROUND = 16
"""Places are counted in multiples of this, so that shapes repeat."""
SHORT = 2 * ROUND
"""Rows up to this long are one span: there is nothing to gain."""
WORTH = 0.75
"""Two spans are made where they look at no more than this share of the places that one looks at."""


class Span(NamedTuple):
    """Rows `first` to `end - 1`, of which none has more than `longest` places."""

    first: int
    end: int
    longest: int


def divide(lengths: np.ndarray, most: int) -> list[Span]:
    """The cheapest spans of rows with these lengths [B], in this order; no span has more than `most` places."""
    whole = Span(0, len(lengths), int(_round_up(lengths.max(), most)))
    if len(lengths) < 2 or whole.longest <= SHORT:
        return [whole]
    before, after = np.maximum.accumulate(lengths), np.maximum.accumulate(lengths[::-1])[::-1]
    ends = np.arange(1, len(lengths))
    longest_before, longest_after = _round_up(before[:-1], most), _round_up(after[1:], most)
    looks = ends * longest_before + ends[::-1] * longest_after
    best = int(looks.argmin())
    if looks[best] > WORTH * cost([whole]):
        return [whole]
    end = best + 1
    return [Span(0, end, int(longest_before[best])), Span(end, len(lengths), int(longest_after[best]))]


def leaders(lengths: np.ndarray, most: int) -> tuple[np.ndarray, list[Span]]:
    """The rows that would make the cheapest two spans if they came first, none if one is as good; and these spans."""
    order = np.argsort(-lengths, kind="stable")
    found = divide(lengths[order], most)
    return order[: found[0].end] if len(found) > 1 else order[:0], found


def cost(spans: list[Span]) -> int:
    """Places that attention looks at, over all rows."""
    return sum((span.end - span.first) * span.longest for span in spans)


def width(length: int) -> int:
    """The places with which a text of this length is computed: its length, or a multiple of `ROUND` above it.

    Vector instructions add up 16 places at once, and the rest one by one: sums of a text depend on its width.
    """
    return length if length <= ROUND else -(-length // ROUND) * ROUND


def _round_up(lengths: np.ndarray, most: int) -> np.ndarray:
    return np.minimum(-(-lengths // ROUND) * ROUND, most)
