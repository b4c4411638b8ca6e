"""Filters of responses, against loops over plain floats and known special cases."""

import math

import pytest
import torch
from padded_rows import Padded, compact, logprob_rows, near, ragged_mask, random_rows

from streamppo.algorithms import rejections

MASK = ragged_mask(1, sequences=12)
BEHAVIOR = logprob_rows(MASK, 3)
CURRENT = near(BEHAVIOR, 4)
ADVANTAGES = random_rows(MASK, 5)
PADDED = Padded(MASK)
COLUMNS = PADDED.tensor(CURRENT), PADDED.tensor(BEHAVIOR), PADDED.tensor(ADVANTAGES), PADDED.mask


@pytest.mark.parametrize("delta", [0.001, 0.02, 0.5])
def test_negative_responses_that_drifted_by_more_than_delta_leave(delta: float) -> None:
    got = rejections.off_policy_negative(*COLUMNS, delta=delta)
    expected = []
    for current, behavior, advantages in zip(
        *(compact(rows, MASK) for rows in (CURRENT, BEHAVIOR, ADVANTAGES)), strict=True
    ):
        drift = sum(b - c for b, c in zip(behavior, current, strict=True)) / max(len(current), 1)
        expected.append([sum(advantages) < 0 and drift > delta] * len(current))
    assert [[bool(x) for x in row] for row in PADDED.unmasked(got)] == expected
    assert not got[~PADDED.mask].any()
    assert any(row[0] for row in expected if row) == (delta < 0.5)


def test_the_paper_s_mask_by_hand() -> None:
    """Behavior is at half a nat above current in rows 0 and 2, below it in row 1; rows 0, 1 and 3 failed."""
    behavior_BT = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    logprobs_BT = torch.tensor([[-1.0, -2.0], [-1.0, 0.0], [-1.0, -2.0], [-1.0, -1.5]], requires_grad=True)
    advantages_BT = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    mask_BT = torch.ones(4, 2, dtype=torch.bool)
    got = rejections.off_policy_negative(logprobs_BT, behavior_BT, advantages_BT, mask_BT, delta=0.3)
    assert got.tolist() == [[True, True], [False, False], [False, False], [False, False]]
    assert not rejections.off_policy_negative(logprobs_BT, behavior_BT, advantages_BT, mask_BT, delta=0.5).any()
    assert not rejections.off_policy_negative(logprobs_BT, behavior_BT, 0 * advantages_BT, mask_BT, delta=0.3).any()


def test_with_all_advantages_negative_it_is_the_lower_bound_of_the_geometric_mean() -> None:
    logprobs_BT, behavior_BT, _, mask_BT = COLUMNS
    negative_BT = torch.full(mask_BT.shape, -1.0)
    got = rejections.off_policy_negative(logprobs_BT, behavior_BT, negative_BT, mask_BT, delta=0.02)
    kept = rejections.ratio_in_band(logprobs_BT, behavior_BT, mask_BT, level="geometric", lo=math.exp(-0.02), hi=1e30)
    assert torch.equal(got, mask_BT & ~kept) and got.any() and (mask_BT & ~got).any()


def test_the_mean_advantage_decides_for_a_whole_response() -> None:
    behavior_BT, logprobs_BT = torch.zeros(2, 3) - 1, torch.zeros(2, 3) - 3
    advantages_BT = torch.tensor([[-0.5, 0.25, 9.0], [0.5, -0.25, -9.0]])
    mask_BT = torch.tensor([[True, True, False], [True, True, False]])
    got = rejections.off_policy_negative(logprobs_BT, behavior_BT, advantages_BT, mask_BT, delta=0.1)
    assert got.tolist() == [[True, True, False], [False, False, False]]


def test_an_engine_that_agrees_or_an_open_bound_leaves_nothing_out() -> None:
    logprobs_BT, behavior_BT, advantages_BT, mask_BT = COLUMNS
    assert not rejections.off_policy_negative(behavior_BT, behavior_BT, advantages_BT, mask_BT, delta=1e-9).any()
    assert not rejections.off_policy_negative(logprobs_BT, behavior_BT, advantages_BT, mask_BT, delta=math.inf).any()
    with pytest.raises(ValueError, match="advantages_BT has shape"):
        rejections.off_policy_negative(logprobs_BT, behavior_BT, advantages_BT[:, :1], mask_BT, delta=1.0)


def test_cut_off_completions_leave_with_the_tokens_that_the_policy_sampled() -> None:
    mask_BT = torch.tensor([[True, False, True], [True, True, False]])
    got = rejections.truncated_tokens(torch.tensor([True, False]), mask_BT)
    assert got.tolist() == [[True, False, True], [False, False, False]]
    assert not rejections.truncated_tokens(torch.tensor([False, False]), mask_BT).any()
    with pytest.raises(ValueError, match="truncated_B has shape"):
        rejections.truncated_tokens(torch.tensor([True]), mask_BT)
