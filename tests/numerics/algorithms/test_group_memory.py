"""Comparing the samples of a prompt takes memory in proportion to the batch, not to its square."""

from typing import Any

import pytest
import torch
from largest import Largest

from streamppo.algorithms import groups
from streamppo.algorithms.advantages import whiten

B, SIZE = 16_384, 8
ROWS = 64
"""Numbers per trajectory that one tensor may hold."""


def whitened(scores_B: torch.Tensor, ids_B: torch.Tensor) -> torch.Tensor:
    return whiten(scores_B[:, None], torch.ones(len(scores_B), 1, dtype=torch.bool), group_ids_B=ids_B)[:, 0]


@pytest.mark.parametrize(
    "compare",
    [groups.zero_variance, groups.grpo, groups.dr_grpo, groups.rloo, groups.maxrl, whitened],
)
def test_no_tensor_of_a_comparison_grows_with_the_square_of_the_batch(compare: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    scores_B = torch.randint(0, 2, (B,), generator=generator).float()
    ids_B = torch.randperm(B, generator=generator) // SIZE
    with Largest() as seen:
        got_B = compare(scores_B, ids_B)
    assert seen.elements <= ROWS * B
    few = (ids_B == 0).nonzero()[:, 0]
    assert torch.equal(got_B[few], compare(scores_B[few], ids_B[few]))
