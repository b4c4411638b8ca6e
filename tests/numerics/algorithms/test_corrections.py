"""Importance weights proximal / behavior against loops over plain floats, and the identities that tie them."""

import math

import pytest
import torch
from padded_rows import Padded, Rows, assert_rows, compact, logprob_rows, near, ragged_mask

from streamppo.algorithms.corrections import (
    Correction,
    Level,
    Mode,
    importance_weights,
    second_moment_mask,
)

LEVELS: list[Level] = ["token", "sequence", "geometric"]
MODES: list[Mode] = ["truncate", "mask", "off"]


def slow_ratios(proximal: Rows, behavior: Rows, level: Level) -> Rows:
    """exp of the token's, summed or averaged log-ratio, for compacted rows."""
    result: Rows = []
    for p, b in zip(proximal, behavior, strict=True):
        d = [x - y for x, y in zip(p, b, strict=True)]
        whole = {"sequence": sum(d), "geometric": sum(d) / max(len(d), 1)}
        result.append([math.exp(x if level == "token" else whole[level]) for x in d])
    return result


def slow_weight(w: float, mode: Mode, cap: float, floor: float, lo: float, hi: float) -> float:
    if mode == "off":
        return 1.0
    return max(floor, min(w, cap)) if mode == "truncate" else (w if lo <= w <= hi else 0.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("floor", [0.0, 0.9])
def test_weights_of_every_level_and_mode_equal_the_slow_ones(level: Level, mode: Mode, floor: float) -> None:
    mask = ragged_mask(1)
    behavior = logprob_rows(mask, 3)
    proximal = near(behavior, 4)
    padded = Padded(mask)
    got = importance_weights(
        padded.tensor(proximal), padded.tensor(behavior), padded.mask,
        level=level, mode=mode, cap=1.1, floor=floor, lo=0.8, hi=1.2,
    )  # fmt: skip
    ratios = slow_ratios(compact(proximal, mask), compact(behavior, mask), level)
    expected = [[slow_weight(w, mode, 1.1, floor, 0.8, 1.2) for w in row] for row in ratios]
    assert_rows(padded.unmasked(got.weights), expected)
    kept = [[float(mode != "mask" or 0.8 <= w <= 1.2) for w in row] for row in ratios]
    assert_rows(padded.unmasked(got.keep), kept)
    assert sum(int(dropped.sum()) for dropped in got.dropped.values()) == int((padded.mask & ~got.keep).sum())
    assert got.weights[~padded.mask].abs().sum() == 0
    assert not got.keep[~padded.mask].any()
    assert not got.weights.requires_grad


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_equal_policies_give_weights_of_one(level: Level, mode: Mode) -> None:
    mask = ragged_mask(1)
    padded = Padded(mask)
    same = padded.tensor(logprob_rows(mask, 3))
    got = importance_weights(same, same, padded.mask, level=level, mode=mode)
    assert torch.equal(got.weights, padded.mask.double())
    assert torch.equal(got.keep, padded.mask)


@pytest.mark.parametrize("threshold", [0.0, 0.005, 0.02, 1.0])
def test_m2po_drops_the_fewest_tokens_that_bring_the_second_moment_under_the_threshold(threshold: float) -> None:
    mask = ragged_mask(1)
    behavior = logprob_rows(mask, 3)
    proximal = near(behavior, 4)
    padded = Padded(mask)
    got = second_moment_mask(padded.tensor(proximal), padded.tensor(behavior), padded.mask, threshold=threshold)
    ratios = slow_ratios(compact(proximal, mask), compact(behavior, mask), "token")
    left = sorted(math.log(w) ** 2 for row in ratios for w in row)
    while left and sum(left) / len(left) > threshold:
        left.pop()
    bound = left[-1] if left else -1.0
    expected = [[w if math.log(w) ** 2 <= bound + 1e-15 else 0.0 for w in row] for row in ratios]
    assert_rows(padded.unmasked(got.weights), expected)
    assert int(got.keep.sum()) == len(left)


def test_extreme_ratios_overflow_nowhere() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    proximal, behavior = torch.tensor([[-1.0, -900.0]]), torch.tensor([[-900.0, -1.0]])
    for level in LEVELS:
        for mode in MODES:
            got = importance_weights(proximal, behavior, mask, level=level, mode=mode)
            assert got.weights.isfinite().all()
    dropped = importance_weights(proximal, behavior, mask, level="token", mode="mask", hi=1e30)
    assert dropped.keep.tolist() == [[False, False]]


def test_other_shapes_are_refused_and_no_token_is_no_error() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    one = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="behavior_logprobs_BT has shape"):
        importance_weights(one, one[:, :1], mask, level="token", mode="off")
    assert isinstance(second_moment_mask(one, one, ~mask), Correction)
