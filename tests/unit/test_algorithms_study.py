"""The study of algorithms adds up its runs by choice and lag bound."""

import sys
from typing import Any

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks.learning.algorithms import markdown, summed


def row(choice: str, max_lag: int, seed: int, reward: float, reached: int | None) -> dict[str, Any]:
    return {
        "choice": choice,
        "max_lag": max_lag,
        "seed": seed,
        "reward": reward,
        "accuracy": 2 * reward,
        "mean_lag": max_lag / 2,
        "ess": 0.5,
        "updates_to_reach": reached,
    }


ROWS = [
    row("loss cispo", 2, 1, 0.5, 30),
    row("default", 2, 2, 0.3, 40),
    row("default", 2, 1, 0.1, 20),
    row("default", 0, 1, 0.2, None),
    row("default", 0, 2, 0.4, 10),
]


def test_seeds_are_a_mean_and_a_range_in_the_order_of_the_choices() -> None:
    table = summed(ROWS)
    assert [(one["choice"], one["max_lag"], one["seeds"]) for one in table] == [
        ("default", 0, 2),
        ("default", 2, 2),
        ("loss cispo", 2, 1),
    ]
    assert table[1]["reward"] == [pytest.approx(0.2), 0.1, 0.3]
    assert table[1]["accuracy"] == [pytest.approx(0.4), 0.2, 0.6]
    assert table[1]["updates_to_reach"] == 30
    assert table[0]["updates_to_reach"] is None, "one of its seeds never came there"


def test_the_table_has_a_line_for_each_choice_and_gaps_where_nothing_ran() -> None:
    assert list(markdown(summed(ROWS))) == [
        "| choice | max_lag 0 | lag | max_lag 2 | lag |",
        "|---|---|---|---|---|",
        "| default | 0.300 (0.200 to 0.400) | 0.0 | 0.200 (0.100 to 0.300) | 1.0 |",
        "| loss cispo |  |  | 0.500 (0.500 to 0.500) | 1.0 |",
    ]
