"""Padded and packed tell the same story; also the ragged batches that the other test_alg files are written with.

A batch is rows of plain floats, one list per sequence, and rows of booleans for the mask. `Layout` turns rows into
a tensor of either layout, with NaN at every masked or padded place, so that a leak cannot go unseen.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from streamppo.algorithms import layout as moves

Rows = list[list[float]]
Mask = list[list[bool]]
NAN = float("nan")


@dataclass(frozen=True)
class Layout:
    """How rows become a tensor: padded [B, T] or packed [N] with cu_seqlens."""

    mask_rows: Mask
    packed: bool

    @property
    def cu_seqlens(self) -> Tensor | None:
        ends = [0]
        for row in self.mask_rows:
            ends.append(ends[-1] + len(row))
        return torch.tensor(ends) if self.packed else None

    @property
    def mask(self) -> Tensor:
        return self.raw([[float(m) for m in row] for row in self.mask_rows], 0.0).bool()

    def raw(self, rows: Rows, beyond: float) -> Tensor:
        if self.packed:
            return torch.tensor([x for row in rows for x in row], dtype=torch.float64)
        longest = max(len(row) for row in rows)
        return torch.tensor([row + [beyond] * (longest - len(row)) for row in rows], dtype=torch.float64)

    def tensor(self, rows: Rows) -> Tensor:
        """The rows, with NaN wherever the mask is False."""
        hidden = [[x if m else NAN for x, m in zip(*rm, strict=True)] for rm in zip(rows, self.mask_rows, strict=True)]
        return self.raw(hidden, NAN)

    def unmasked(self, x: Tensor) -> Rows:
        """What the tensor says at unmasked tokens, sequence by sequence."""
        flat = iter(x[self.mask].tolist())
        return [[next(flat) for m in row if m] for row in self.mask_rows]


def compact(rows: Rows, mask_rows: Mask) -> Rows:
    """The rows without their masked tokens: what every reference computes on."""
    return [[x for x, m in zip(*rm, strict=True) if m] for rm in zip(rows, mask_rows, strict=True)]


def ragged_mask(seed: int = 0, sequences: int = 5) -> Mask:
    """Lengths 1 to 9, holes in the middle, one sequence that is masked altogether."""
    rng = random.Random(seed)
    rows = [[rng.random() < 0.75 for _ in range(rng.randint(2, 9))] for _ in range(sequences)]
    rows[0][0] = rows[-1][0] = True
    rows[0][1] = False
    rows[1] = [False] * len(rows[1])
    rows.append([True])
    return rows


def random_rows(mask_rows: Mask, seed: int, low: float = -1.0, high: float = 1.0) -> Rows:
    rng = random.Random(seed)
    return [[rng.uniform(low, high) for _ in row] for row in mask_rows]


def logprob_rows(mask_rows: Mask, seed: int) -> Rows:
    return random_rows(mask_rows, seed, -3.0, -0.05)


def near(rows: Rows, seed: int, by: float = 0.4) -> Rows:
    """Log-probs of a policy that is up to `by` away."""
    rng = random.Random(seed)
    return [[min(x + rng.uniform(-by, by), -1e-4) for x in row] for row in rows]


def assert_rows(actual: Rows, expected: Rows, tolerance: float = 1e-9) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a == pytest.approx(e, rel=tolerance, abs=tolerance)


LAYOUTS = [pytest.param(False, id="padded"), pytest.param(True, id="packed")]


@pytest.mark.parametrize("packed", LAYOUTS)
def test_sums_means_and_counts_of_a_sequence_look_at_its_unmasked_tokens_only(packed: bool) -> None:
    mask = ragged_mask()
    rows = random_rows(mask, 1)
    lay = Layout(mask, packed)
    x, kept = lay.tensor(rows), compact(rows, mask)
    assert moves.sequence_sum(x, lay.mask, lay.cu_seqlens).tolist() == pytest.approx([sum(r) for r in kept])
    assert moves.sequence_count(lay.mask, lay.cu_seqlens).tolist() == [len(r) for r in kept]
    means = [sum(r) / len(r) if r else 0.0 for r in kept]
    assert moves.sequence_mean(x, lay.mask, lay.cu_seqlens).tolist() == pytest.approx(means)


@pytest.mark.parametrize("packed", LAYOUTS)
def test_a_score_is_spread_over_all_unmasked_tokens_or_put_on_the_last_of_them(packed: bool) -> None:
    mask = ragged_mask()
    lay = Layout(mask, packed)
    scores = torch.arange(1.0, len(mask) + 1)
    everywhere = moves.spread(scores, lay.mask, lay.cu_seqlens)
    assert_rows(lay.unmasked(everywhere), [[b + 1.0 for m in row if m] for b, row in enumerate(mask)])
    assert everywhere[~lay.mask].abs().sum() == 0
    at_end = moves.on_last_token(scores, lay.mask, cu_seqlens=lay.cu_seqlens)
    expected = [[0.0] * (sum(row) - 1) + [b + 1.0] if any(row) else [] for b, row in enumerate(mask)]
    assert_rows(lay.unmasked(at_end), expected)
    assert at_end[~lay.mask].abs().sum() == 0


def test_packing_undoes_padding_and_gradients_go_through_both() -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 7])
    x = torch.arange(1.0, 8.0, dtype=torch.float64, requires_grad=True)
    padded = moves.pad(x, cu_seqlens)
    assert padded.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [4, 5, 6, 7]]
    assert moves.pack(padded, cu_seqlens).tolist() == x.tolist()
    assert moves.segment_ids(cu_seqlens).tolist() == [0, 0, 0, 2, 2, 2, 2]
    moves.pack(padded * padded, cu_seqlens).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2 * v for v in x.tolist()]


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"values has shape \(2, 4\) but mask has \(2, 3\)"):
        moves.check(mask, None, values=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="mask must be bool"):
        moves.check(mask.float(), None)
    with pytest.raises(ValueError, match=r"needs \[N\] with cu_seqlens"):
        moves.check(mask, torch.tensor([0, 3, 6]))
    with pytest.raises(ValueError, match="cu_seqlens ends at 6 but there are 5 tokens"):
        moves.pad(torch.zeros(5), torch.tensor([0, 3, 6]))
    with pytest.raises(ValueError, match="1-d integer"):
        moves.check(mask[0], torch.tensor([0.0, 3.0]))
    with pytest.raises(ValueError, match=r"scores has shape \(3,\); expected \(2,\)"):
        moves.check_sequences(mask, None, scores=torch.zeros(3))


def test_small_types_are_computed_in_float32_and_float64_stays() -> None:
    assert moves.fill(torch.zeros(2, dtype=torch.bfloat16), torch.ones(2).bool()).dtype == torch.float32
    assert moves.fill(torch.zeros(2, dtype=torch.float64), torch.ones(2).bool()).dtype == torch.float64
