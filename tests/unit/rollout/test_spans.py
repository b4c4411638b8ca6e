"""Rows are divided so that attention looks at few places, and long rows come first where that pays."""

import numpy as np
import pytest

from streamppo.rollout.embedded.spans import MOST_SHARE, SHORT, Span, cost, divide, move_long_rows_first

MOST = 4096


def of(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)


@pytest.mark.parametrize(
    ("lengths", "spans"),
    [
        (of(SHORT, 3, 3), [Span(0, 3, 32)]),
        (of(500), [Span(0, 1, 512)]),
        (of(500, 3, 9, 17), [Span(0, 1, 512), Span(1, 4, 32)]),
        (of(3, 9, 500), [Span(0, 2, 16), Span(2, 3, 512)]),
        (of(3, 500, 3), [Span(0, 1, 16), Span(1, 3, 512)]),
        (of(500, 490, 480, 3), [Span(0, 4, 512)]),
        (of(4090, 3, 3), [Span(0, 1, MOST), Span(1, 3, 16)]),
    ],
)
def test_a_step_is_divided_where_that_saves_a_quarter_of_the_places(lengths: np.ndarray, spans: list[Span]) -> None:
    assert divide(lengths, MOST) == spans


def test_no_span_is_longer_than_the_cache() -> None:
    assert divide(of(500, 3, 3), 505) == [Span(0, 1, 505), Span(1, 3, 16)]


def test_long_rows_are_the_leaders_and_of_equal_ones_there_are_none() -> None:
    assert sorted(move_long_rows_first(of(3, 500, 3, 450, 9), MOST)[0]) == [1, 3]
    assert len(move_long_rows_first(of(500, 490, 480), MOST)[0]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_a_span_that_is_long_enough_and_leaders_make_it_cheapest(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = (1 + 8 * generator.pareto(1.3, 30)).astype(np.int64).clip(max=600)
    found, (first, best) = divide(lengths, MOST), move_long_rows_first(lengths, MOST)
    assert [row for span in found for row in range(span.first, span.end)] == list(range(30))
    assert all((lengths[span.first : span.end] <= span.longest).all() for span in found)
    ahead = divide(np.concatenate([lengths[first], np.delete(lengths, first)]), MOST)
    assert ahead == best
    assert cost(ahead) <= cost(found)
    longest = -(-int(lengths.max()) // 16) * 16
    by_hand = min(n * longest + (30 - n) * -(-int(np.sort(lengths)[::-1][n]) // 16) * 16 for n in range(1, 30))
    assert cost(ahead) == (by_hand if longest > SHORT and by_hand <= MOST_SHARE * 30 * longest else 30 * longest)
