"""Ragged batches as rows of plain floats, one list per sequence, with rows of booleans for the mask.

`Padded` turns rows into a [B, T] tensor with NaN at every masked or padded token, so that a leak gives NaN.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

Rows = list[list[float]]
Mask = list[list[bool]]
NAN = float("nan")


@dataclass(frozen=True)
class Padded:
    """Converts rows to [B, T] tensors, padded on the right, and back."""

    mask_rows: Mask

    @property
    def mask(self) -> Tensor:
        """[B, T] bool."""
        return self.raw([[float(m) for m in row] for row in self.mask_rows], 0.0).bool()

    def raw(self, rows: Rows, beyond: float) -> Tensor:
        """The rows as a float64 tensor, padded with `beyond`."""
        longest = max(len(row) for row in rows)
        return torch.tensor([row + [beyond] * (longest - len(row)) for row in rows], dtype=torch.float64)

    def tensor(self, rows: Rows) -> Tensor:
        """The rows as a float64 tensor, with NaN where the mask is False."""
        hidden = [[x if m else NAN for x, m in zip(*rm, strict=True)] for rm in zip(rows, self.mask_rows, strict=True)]
        return self.raw(hidden, NAN)

    def unmasked(self, x: Tensor) -> Rows:
        """The tensor's values at unmasked tokens, one list per sequence."""
        flat = iter(x[self.mask].tolist())
        return [[next(flat) for m in row if m] for row in self.mask_rows]


def compact(rows: Rows, mask_rows: Mask) -> Rows:
    """The rows without masked tokens, the input of every slow reference."""
    return [[x for x, m in zip(*rm, strict=True) if m] for rm in zip(rows, mask_rows, strict=True)]


def ragged_mask(seed: int = 0, sequences: int = 5) -> Mask:
    """A mask of rows of 1 to 9 tokens, with masked tokens in the middle, and one row that is all masked."""
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
    """Log-probs of another policy, which differ by at most `by`."""
    rng = random.Random(seed)
    return [[min(x + rng.uniform(-by, by), -1e-4) for x in row] for row in rows]


def assert_rows(actual: Rows, expected: Rows, tolerance: float = 1e-9) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a == pytest.approx(e, rel=tolerance, abs=tolerance)
