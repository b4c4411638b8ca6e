"""Sums, means and scores see unmasked tokens alone, and shapes that do not fit are refused."""

import pytest
import torch
from padded_rows import Padded, assert_rows, compact, ragged_mask, random_rows

from streamppo.algorithms import masked


def test_sums_means_and_counts_of_a_sequence_look_at_its_unmasked_tokens_only() -> None:
    mask = ragged_mask()
    rows = random_rows(mask, 1)
    padded = Padded(mask)
    x, kept = padded.tensor(rows), compact(rows, mask)
    assert masked.sequence_sum(x, padded.mask).tolist() == pytest.approx([sum(r) for r in kept])
    assert masked.sequence_count(padded.mask).tolist() == [len(r) for r in kept]
    means = [sum(r) / len(r) if r else 0.0 for r in kept]
    assert masked.sequence_mean(x, padded.mask).tolist() == pytest.approx(means)


def test_a_score_is_spread_over_all_unmasked_tokens_or_put_on_the_last_of_them() -> None:
    mask = ragged_mask()
    padded = Padded(mask)
    scores = torch.arange(1.0, len(mask) + 1)
    everywhere = masked.spread(scores, padded.mask)
    assert_rows(padded.unmasked(everywhere), [[b + 1.0 for m in row if m] for b, row in enumerate(mask)])
    assert everywhere[~padded.mask].abs().sum() == 0
    at_end = masked.on_last_token(scores, padded.mask)
    expected = [[0.0] * (sum(row) - 1) + [b + 1.0] if any(row) else [] for b, row in enumerate(mask)]
    assert_rows(padded.unmasked(at_end), expected)
    assert at_end[~padded.mask].abs().sum() == 0


def test_a_masked_nan_reaches_neither_result_nor_gradient() -> None:
    x = torch.tensor([[2.0, float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    filled = masked.fill(x, mask)
    (filled * filled).sum().backward()
    assert filled.tolist() == [[2.0, 0.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [[4.0, 0.0]]


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"values_BT has shape \(2, 4\) but mask has \(2, 3\)"):
        masked.check_tokens(mask, values_BT=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="mask must be bool"):
        masked.check_tokens(mask.float())
    with pytest.raises(ValueError, match=r"mask has shape \(3,\); it must be \[B, T\]"):
        masked.check_tokens(mask[0])
    with pytest.raises(ValueError, match=r"scores_B has shape \(3,\); expected \(2,\)"):
        masked.check_sequences(mask, scores_B=torch.zeros(3))
    with pytest.raises(ValueError, match="x_B has shape"):
        masked.on_last_token(torch.zeros(3), mask)


def test_small_types_are_computed_in_float32_and_float64_stays() -> None:
    assert masked.fill(torch.zeros(2, dtype=torch.bfloat16), torch.ones(2).bool()).dtype == torch.float32
    assert masked.fill(torch.zeros(2, dtype=torch.float64), torch.ones(2).bool()).dtype == torch.float64
