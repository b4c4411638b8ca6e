"""Rejection rules, against loops over plain floats and known special cases."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from padded_rows import Padded, Rows, assert_rows, compact, logprob_rows, near, ragged_mask
from torch import Tensor

from streamppo.algorithms import rejections
from streamppo.algorithms.corrections import Correction, importance_weights
from streamppo.algorithms.rejections import RejectionRule, reject

MASK = ragged_mask(1, sequences=12)
BEHAVIOR = logprob_rows(MASK, 3)
PROXIMAL = near(BEHAVIOR, 4)
PADDED = Padded(MASK)
COLUMNS = PADDED.tensor(PROXIMAL), PADDED.tensor(BEHAVIOR), PADDED.mask


def slow_log_ratios() -> Rows:
    rows = compact(PROXIMAL, MASK), compact(BEHAVIOR, MASK)
    return [[p - b for p, b in zip(*row, strict=True)] for row in zip(*rows, strict=True)]


def slow_k3(row: list[float]) -> float:
    return sum(math.exp(x) - 1 - x for x in row) / max(len(row), 1)


SLOW: dict[str, tuple[RejectionRule, Callable[[list[float]], list[bool]]]] = {
    "token": (
        RejectionRule("token", partial(rejections.ratio_in_band, level="token", lo=0.8, hi=1.2)),
        lambda row: [0.8 <= math.exp(x) <= 1.2 for x in row],
    ),
    "sequence": (
        RejectionRule("sequence", partial(rejections.ratio_in_band, level="sequence", lo=0.8, hi=1.2)),
        lambda row: [0.8 <= math.exp(sum(row)) <= 1.2] * len(row),
    ),
    "geometric": (
        RejectionRule("geometric", partial(rejections.ratio_in_band, level="geometric", lo=0.93, hi=1.07)),
        lambda row: [0.93 <= math.exp(sum(row) / max(len(row), 1)) <= 1.07] * len(row),
    ),
    "outlier": (
        RejectionRule("outlier", partial(rejections.outlier_free, lo=0.72, hi=1.3)),
        lambda row: [all(0.72 <= math.exp(x) <= 1.3 for x in row)] * len(row),
    ),
    "k3": (
        RejectionRule("k3", partial(rejections.mean_k3, at_most=0.03)),
        lambda row: [slow_k3(row) <= 0.03] * len(row),
    ),
}


def ones() -> Correction:
    return importance_weights(*COLUMNS, level="token", mode="off")


@pytest.mark.parametrize("name", SLOW)
def test_a_rule_alone_gives_weight_1_to_what_it_keeps_and_names_the_rest(name: str) -> None:
    rule, slow = SLOW[name]
    got = reject(ones(), *COLUMNS, [rule])
    expected = [slow(row) for row in slow_log_ratios()]
    assert_rows(PADDED.unmasked(got.weights), [[float(kept) for kept in row] for row in expected])
    assert_rows(PADDED.unmasked(got.keep.double()), [[float(kept) for kept in row] for row in expected])
    assert torch.equal(got.dropped[name], PADDED.mask & ~got.keep)
    assert {kept for row in expected for kept in row} == {True, False}
    assert not got.keep[~PADDED.mask].any() and not got.weights[~PADDED.mask].any()


@pytest.mark.parametrize("first", SLOW)
@pytest.mark.parametrize("second", SLOW)
def test_of_two_rules_both_must_keep_and_each_is_counted_by_itself(first: str, second: str) -> None:
    truncated = importance_weights(*COLUMNS, level="token", mode="truncate", cap=1.1)
    got = reject(truncated, *COLUMNS, [SLOW[first][0], SLOW[second][0]])
    expected = [
        [min(math.exp(x), 1.1) if one and other else 0.0 for x, one, other in zip(*rows, strict=True)]
        for rows in zip(
            slow_log_ratios(),
            [SLOW[first][1](row) for row in slow_log_ratios()],
            [SLOW[second][1](row) for row in slow_log_ratios()],
            strict=True,
        )
    ]
    assert_rows(PADDED.unmasked(got.weights), expected)
    for name in (first, second):
        assert torch.equal(got.dropped[name], reject(ones(), *COLUMNS, [SLOW[name][0]]).dropped[name])


def test_the_ratio_as_weight_and_a_rule_for_tokens_is_the_mask_of_icepop() -> None:
    ratio = importance_weights(*COLUMNS, level="token", mode="truncate", cap=1e30)
    got = reject(ratio, *COLUMNS, [SLOW["token"][0]])
    icepop = importance_weights(*COLUMNS, level="token", mode="mask", lo=0.8, hi=1.2)
    assert torch.equal(got.weights, icepop.weights) and torch.equal(got.keep, icepop.keep)
    assert torch.equal(got.dropped["token"], icepop.dropped["mask"])


def test_without_a_rule_and_with_equal_policies_nothing_is_rejected() -> None:
    assert torch.equal(reject(ones(), *COLUMNS, []).weights, ones().weights)
    same = COLUMNS[1], COLUMNS[1], COLUMNS[2]
    got = reject(ones(), *same, [rule for rule, _ in SLOW.values()])
    assert torch.equal(got.keep, PADDED.mask)
    assert not any(dropped.any() for dropped in got.dropped.values())


def test_on_responses_of_one_token_the_rules_of_bands_are_one() -> None:
    proximal_BT, mask_BT = torch.tensor([[-0.1], [-1.0], [-3.0]]), torch.ones(3, 1, dtype=torch.bool)
    behavior_BT = torch.full((3, 1), -1.0)
    for rule in (
        partial(rejections.ratio_in_band, level="token"),
        partial(rejections.ratio_in_band, level="sequence"),
        partial(rejections.ratio_in_band, level="geometric"),
        rejections.outlier_free,
    ):
        assert rule(proximal_BT, behavior_BT, mask_BT, lo=0.5, hi=2.0).tolist() == [[False], [True], [False]]


def test_deviations_of_two_signs_cancel_in_the_geometric_mean_and_in_nothing_else() -> None:
    proximal_BT, behavior_BT = torch.tensor([[-1.0, -3.0, -2.0]]), torch.tensor([[-2.0, -2.0, -2.0]])
    mask_BT = torch.ones(1, 3, dtype=torch.bool)
    columns = proximal_BT, behavior_BT, mask_BT
    assert rejections.ratio_in_band(*columns, level="geometric", lo=0.99, hi=1.01).all()
    assert not rejections.outlier_free(*columns, lo=0.5, hi=2.0).any()
    k3 = (math.exp(1) - 2 + math.exp(-1)) / 3
    assert rejections.mean_k3(*columns, at_most=k3 + 1e-5).all()
    assert not rejections.mean_k3(*columns, at_most=k3 - 1e-5).any()


def test_padding_and_other_responses_change_no_decision() -> None:
    wide = [torch.nn.functional.pad(column, (0, 3), value=float("nan")) for column in COLUMNS[:2]]
    wide_columns = *wide, torch.nn.functional.pad(PADDED.mask, (0, 3))
    for rule, _ in SLOW.values():
        whole: Tensor = reject(ones(), *COLUMNS, [rule]).keep
        wider_ones = importance_weights(*wide_columns, level="token", mode="off")
        assert torch.equal(reject(wider_ones, *wide_columns, [rule]).keep[:, : whole.shape[1]], whole)
        for row in range(len(whole)):
            columns = tuple(column[row : row + 1] for column in COLUMNS)
            one = importance_weights(*columns, level="token", mode="off")
            assert torch.equal(reject(one, *columns, [rule]).keep, whole[row : row + 1])


def test_a_log_prob_that_is_no_number_is_kept_to_make_a_bad_step() -> None:
    proximal_BT, behavior_BT = torch.tensor([[math.nan, -1.0]]), torch.tensor([[-1.0, -1.0]])
    columns = proximal_BT, behavior_BT, torch.ones(1, 2, dtype=torch.bool)
    off = importance_weights(*columns, level="token", mode="off")
    for rule, _ in SLOW.values():
        assert reject(off, *columns, [rule]).keep.all()
    masked = importance_weights(*columns, level="token", mode="mask")
    assert masked.keep.all() and masked.weights[0, 0].isnan()
