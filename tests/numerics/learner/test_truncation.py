"""A completion that was cut off and scored is finished for the critic, unless the configuration says otherwise."""

import learner_case as case
import pytest
import torch
from conftest import trajectory

from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model.policy import empty_output
from streamppo.learner.objective import objective
from streamppo.types import Batch

RIGHT, CUT = slice(0, 7), slice(7, 10)


def thirty_percent_cut_off() -> PaddedBatch:
    """Ten answers of three tokens: seven right ones at reward 1, and three that were cut off at reward 0."""
    right = [trajectory([5, 6, 1], number=n, reward=1.0) for n in range(7)]
    cut = [trajectory([5, 6, 7], number=n, reward=0.0, finish="length") for n in range(7, 10)]
    return pad(Batch(version=0, min_version=0, trajectories=(*right, *cut)))


@pytest.mark.parametrize("kind", ["gae", "vtrace"])
@pytest.mark.parametrize(
    ("bootstrap", "right", "wrong"), [("", 0.3, -0.7), (", bootstrap_truncated = true", 0.0, 0.0)], ids=["not", "asked"]
)
def test_answers_that_were_cut_off_are_told_apart_from_right_ones(
    kind: str, bootstrap: str, right: float, wrong: float
) -> None:
    """The critic gives every token the same value: that of the mean return, found by continuing until it stays."""
    advantage = f"algorithm.advantage={{kind = '{kind}', gamma = 1.0, lam = 1.0{bootstrap}}}"
    estimate = objective.build(case.config_of(advantage, "algorithm.whiten.over=off")).advantages
    batch = thirty_percent_cut_off()
    value = torch.zeros(())
    advantages_BT = torch.zeros(10, 3)
    for _ in range(100):
        scored = empty_output(batch)._replace(values_BT=value.expand(10, 3), bootstrap_B=value.expand(10))
        advantages_BT, returns_BT = estimate(batch, scored, batch.rewards_BT)
        value = returns_BT.mean()
    assert torch.allclose(advantages_BT[RIGHT], torch.tensor(right), atol=1e-4)
    assert torch.allclose(advantages_BT[CUT], torch.tensor(wrong), atol=1e-4)
