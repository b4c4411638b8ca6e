"""Rows that stay in the cache: the reused beginning of a prompt, and the evicted rows."""

from collections.abc import Sequence

import numpy as np
import pytest

from streamppo.rollout.embedded import prefixes as prefixes_module
from streamppo.rollout.embedded.prefixes import Prefix, Prefixes
from streamppo.types import Ints

NOWHERE = -1


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a test are short."""
    monkeypatch.setattr(prefixes_module, "LEAST_TOKENS", 1)


def ints(*tokens: int) -> Ints:
    return np.array(tokens, np.int32)


def prefix(tokens: Ints, cached: int, root: int) -> Prefix:
    """A prefix whose tokens were computed by one version after another, from 10 on."""
    return Prefix(tokens, cached, root, np.arange(10, 10 + cached, dtype=np.int32))


def starts(kept: Prefixes, prompts: list[Ints], running: Sequence[tuple[int, Prefix]] = ()) -> list[tuple[int, ...]]:
    """Row, common tokens and root of each start; those in a cache have the versions that computed them."""
    found = kept.starts(prompts, running)
    for start in found:
        assert start.computed.tolist() == list(range(10, 10 + start.common))
    return [start[:3] for start in found]


@pytest.mark.parametrize(
    ("prompt", "common"),
    [
        ((1, 2, 3, 4, 5, 6), 3),
        ((1, 2, 3, 4), 3),
        ((1, 2, 3, 9, 9), 3),
        ((1, 2, 3), 2),
        ((1, 2), 0),
        ((1, 2, 9), 0),
        ((1, 9, 3, 4, 5), 0),
        ((9, 2, 3, 4, 5), 0),
        ((1,), 0),
    ],
)
def test_a_prompt_begins_from_the_cached_tokens_of_a_row_whose_completion_it_continues(
    prompt: tuple[int, ...], common: int
) -> None:
    row = prefix(ints(1, 2, 3, 4), cached=3, root=2)
    assert row.common(ints(*prompt)) == common


def filled(*rows: int) -> Prefixes:
    """Rows of the prompt [row], completion [100, row, 7], in their order of use."""
    prefixes = Prefixes()
    for row in rows:
        prefixes.add(row, prefix(ints(row, 100, row, 7), cached=3, root=1))
    return prefixes


def test_the_longest_beginning_is_taken_from_rows_that_have_ended_or_run() -> None:
    prefixes = Prefixes()
    prefixes.add(3, prefix(ints(1, 2, 3, 4), cached=3, root=1))
    prefixes.add(4, prefix(ints(1, 2, 3, 4, 5, 6), cached=5, root=1))
    running = [(0, prefix(ints(1, 2, 8, 8, 8), cached=5, root=2))]
    prompts = [ints(1, 2, 3, 4, 5, 6, 7), ints(1, 2, 8, 8, 8, 8), ints(1, 3)]
    assert starts(prefixes, prompts, running) == [(4, 5, 1), (0, 5, 2), (NOWHERE, 0, 2)]
    assert len(prefixes) == 1, "the row that continues has all of it"


def test_two_prompts_begin_from_one_row_at_once() -> None:
    prefixes = filled(5)
    prompts = [ints(5, 100, 5, 7, 8), ints(5, 100, 9)]
    assert starts(prefixes, prompts, []) == [(5, 3, 1), (5, 2, 1)]


def test_the_least_recently_used_rows_go_and_the_others_move_out_of_the_way() -> None:
    prefixes = filled(2, 3, 4, 5)
    # The beginning of row 2 is used: row 3 is the one that was not for longest.
    starts(prefixes, [ints(2, 100, 9)], [])
    assert prefixes.make_room(2, 4, 7) == [(2, 6, 3)]
    assert prefixes.make_room(4, 6, 7) == []
    assert starts(prefixes, [ints(2, 100, 2, 7, 1)], []) == [(6, 3, 1)]
    assert starts(prefixes, [ints(row, 100, row, 7, 1) for row in (3, 4, 5)], []) == 3 * [(NOWHERE, 0, 5)]


def test_nothing_is_left_when_the_weights_have_changed() -> None:
    prefixes = filled(1, 2)
    prefixes.clear()
    assert starts(prefixes, [ints(1, 100, 1, 7, 1)], []) == [(NOWHERE, 0, 5)]
