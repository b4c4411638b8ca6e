"""Deltas: the result is the input bit for bit, or an error that has changed nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamppo.errors import WeightsError
from streamppo.weights import delta

WIDTHS = st.sampled_from([1, 2, 4, 8])


def bytes_of(count: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count * width, dtype=np.uint8)


def changed(before: np.ndarray, places: np.ndarray, width: int, seed: int = 1) -> np.ndarray:
    """A copy with other bits at `places`."""
    after = before.copy()
    elements = after.view(f"<u{width}")
    elements[places] ^= np.random.default_rng(seed).integers(1, 256, len(places)).astype(elements.dtype)
    return after


@settings(max_examples=200, deadline=None)
@given(WIDTHS, st.integers(1, 70_000), st.floats(0, 0.2), st.integers(0, 1000))
def test_before_and_the_delta_make_after(width: int, count: int, share: float, seed: int) -> None:
    before = bytes_of(count, width, seed)
    places = np.flatnonzero(np.random.default_rng(seed).random(count) < share)
    after = changed(before, places, width)
    encoded = delta.changes(before, after, width)
    # Of less than 20 bytes the beginning of a delta is too large a part.
    assert (encoded is None) == (len(places) > delta.DENSE * count) or count < 20
    if encoded is not None:
        assert encoded.nbytes < after.nbytes
        made = before.copy()
        delta.apply(encoded, made, width)
        assert np.array_equal(made, after)


@pytest.mark.parametrize("gap", [1, 255, 256, 257, 511, 512, 513, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_gaps_of_every_length_survive(gap: int, width: int) -> None:
    before = bytes_of(500_000, width, seed=gap)
    after = changed(before, np.arange(gap - 1, 500_000, max(gap, 40)), width)
    encoded = delta.changes(before, after, width)
    assert encoded is not None
    delta.apply(encoded, before, width)
    assert np.array_equal(before, after)


def test_signs_of_zero_and_payloads_of_nan_survive() -> None:
    before = np.zeros(100, dtype=np.uint32)
    before[40] = 0x7FC00001
    after = before.copy()
    after[3], after[40] = 0x80000000, 0x7FC00002
    encoded = delta.changes(before.view(np.uint8), after.view(np.uint8), 4)
    assert encoded is not None
    delta.apply(encoded, before.view(np.uint8), 4)
    assert np.array_equal(before, after)


def test_nothing_changed_is_next_to_nothing_and_everything_changed_is_no_delta() -> None:
    before = bytes_of(10_000, 2, seed=0)
    encoded = delta.changes(before, before.copy(), 2)
    assert encoded is not None and encoded.nbytes == delta.HEAD_BYTES
    assert delta.changes(before, changed(before, np.arange(10_000), 2), 2) is None
    beginning = changed(before, np.arange(2_000), 2)
    assert delta.changes(before, beginning, 2) is None, "its first elements are like the others"


def test_a_small_step_of_adam_in_bfloat16_takes_a_twentieth_of_the_bytes() -> None:
    weights = np.random.default_rng(0).normal(0, 0.02, 1_000_000).astype(np.float32)
    step = np.float32(1e-6) * np.random.default_rng(1).choice([-1, 1], 1_000_000).astype(np.float32)
    before, after = ((one.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for one in (weights, weights + step))
    encoded = delta.changes(before, after, 2)
    assert encoded is not None and 0 < encoded.nbytes <= after.nbytes / 20
    delta.apply(encoded, before, 2)
    assert np.array_equal(before, after)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_was_cut_or_flipped_is_refused_or_stays_inside(data: st.DataObject) -> None:
    before = bytes_of(3000, 2, seed=0)
    encoded = delta.changes(before, changed(before, np.arange(0, 3000, 11), 2), 2)
    assert encoded is not None
    broken = encoded[: data.draw(st.integers(0, len(encoded)))].copy()
    if len(broken):
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(1, 255))
    # Memory beside what it may change.
    memory = np.concatenate([np.full(64, 7, dtype=np.uint8), before, np.full(64, 7, dtype=np.uint8)])
    try:
        delta.apply(broken, memory[64:-64], 2)
    except WeightsError:
        assert np.array_equal(memory[64:-64], before)
    assert (memory[:64] == 7).all() and (memory[-64:] == 7).all()


def test_a_compressed_delta_that_is_damaged_is_refused() -> None:
    before = bytes_of(1_000_000, 2, seed=0)
    encoded = delta.changes(before, changed(before, np.arange(0, 1_000_000, 30), 2), 2)
    assert encoded is not None and encoded[1] == 1
    untouched = before.copy()
    for broken in (encoded[: len(encoded) - 100], encoded[:-1]):
        with pytest.raises(WeightsError, match="cannot be decompressed"):
            delta.apply(broken, before, 2)
    assert np.array_equal(before, untouched)
