"""Routes are read back as they were written, in a byte a number where that tells all of them."""

import msgspec
import numpy as np
import pytest
from conftest import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from streamppo.queue.rules.validation import TokenLimits, defect
from streamppo.queue.store import batch_parts, columns
from streamppo.types import Batch, TokenRecord, Trajectory, routes

UNKNOWN = [-1, -1]


def row(numbers_SE: list[list[int]]) -> Trajectory:
    """A trajectory with these experts of its tokens but the last."""
    column, width = routes.column(np.array(numbers_SE, np.int16))
    made = trajectory([5] * (len(numbers_SE) - 1), prompt=(3, 4))
    return msgspec.structs.replace(made, routes=column, route_bytes=width)


def batch() -> Batch:
    """A row whose experts take a byte, one with two, and one without routes."""
    rows = row([[0, 255], UNKNOWN, [7, 8]]), row([[0, 256], [1, 2]]), trajectory([5, 6])
    return Batch(version=3, min_version=1, trajectories=rows)


@settings(max_examples=300, deadline=None)
@given(
    arrays.arrays(
        np.int16, st.tuples(st.integers(1, 5), st.integers(1, 4)), elements=st.sampled_from([-1, 0, 254, 255, 256])
    ),
)
def test_every_token_has_the_experts_that_were_written(numbers_SE: np.ndarray) -> None:
    column, width = routes.column(numbers_SE)
    read_SE, known_S = routes.read(column, width, len(numbers_SE))
    assert known_S.tolist() == (numbers_SE != -1).any(axis=1).tolist()
    assert read_SE[known_S].tolist() == numbers_SE[known_S].tolist()
    assert routes.flaw(column, width, len(numbers_SE)) is None


@pytest.mark.parametrize(
    ("numbers_SE", "width"),
    [
        ([[0, 1], UNKNOWN, [127, 3]], 1),
        ([[0, 255], [255, 254]], 1),
        ([[0, 256], [255, 254]], 2),
        ([[0, -1], [1, 2]], 2),
        ([[255, 255], [1, 2]], 2),
    ],
    ids=["128 experts", "256 experts", "more", "a layer alone is missing", "a token that would count as missing"],
)
def test_a_number_takes_a_byte_where_it_tells_everything(numbers_SE: list[list[int]], width: int) -> None:
    column, found = routes.column(np.array(numbers_SE, np.int16))
    assert (found, len(column)) == (width, width * np.size(numbers_SE))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"routes": bytes(7)}, "routes of 7 bytes for 3 tokens"),
        ({"route_bytes": 2}, "a route to expert -256"),
        ({"route_bytes": 3}, "routes of 3 bytes a number"),
    ],
)
def test_a_width_that_does_not_go_with_the_tokens_is_refused(change: dict[str, object], reason: str | None) -> None:
    made = row([[0, 255], UNKNOWN, [7, 8]])
    assert defect(msgspec.structs.replace(made, **change), TokenLimits(17, 5, None, routes=True)) == reason


def test_parts_and_columns_of_a_batch_keep_each_width() -> None:
    whole = batch()
    assert [one.route_bytes for one in whole.trajectories] == [1, 2, 2]
    outline = batch_parts.make_outline(whole)
    assert batch_parts.join(outline, batch_parts.select_tokens(whole, [1, 2, 0])) == whole
    made, attributes = columns.batch_columns(whole, TokenRecord())
    columns.verify(made, attributes)
    assert made["routes"].dtype == np.uint8 and columns.to_batch(made, attributes) == whole
    plain = msgspec.structs.replace(whole, trajectories=whole.trajectories[1:])
    made, attributes = columns.batch_columns(plain, TokenRecord())
    assert made["routes"].dtype == np.int16 and "route_bytes" not in made, "as before there was a width"


@pytest.mark.parametrize("widths", [[2, 2, 2], [1, 3, 2]])
def test_columns_whose_widths_are_not_those_of_a_batch_are_refused(widths: list[int]) -> None:
    made, attributes = columns.batch_columns(batch(), TokenRecord())
    with pytest.raises(ValueError, match="routes of uint8"):
        columns.verify(made | {"route_bytes": np.array(widths)}, attributes)
