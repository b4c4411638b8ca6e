"""Weights by the sign of an advantage in an update: what they reach, and what they leave alone."""

from pathlib import Path

import learner_case as case
import pytest
import torch
from msgspec.structs import replace

from streamppo.learner.batch.padded import PaddedBatch, pad

TOPR, QUARTER = "algorithm.correction.kind=topr", "algorithm.negative_weight=0.25"
SIGN_LOSS = Path(__file__).parents[2] / "support" / "sign_loss.py"
OFF = "algorithm.correction.kind=off"
ADVANTAGES = ["gae", "vtrace", "sequence", "grpo", "rloo", "reinforce_plus_plus"]
pytestmark = pytest.mark.usefixtures("alone")


def own_batch(folder: Path) -> PaddedBatch:
    """A batch whose behavior log-probs are the learner's own: lag and numerics of 0."""
    updater, batch = case.updater(case.config_of(), folder), pad(case.batch())
    with torch.no_grad():
        logprobs_BT = updater.policy(batch, "policy").logprobs_BT
    return batch._replace(behavior_logprobs_BT=logprobs_BT.masked_fill(~batch.mask_BT, 0.0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ADVANTAGES)
def test_without_lag_topr_is_no_correction(folder: Path, kind: str) -> None:
    batch, advantage = own_batch(folder), f"algorithm.advantage.kind={kind}"
    tapered, off = (case.updated(folder, batch, one, advantage, "learner.minibatches=2") for one in (TOPR, OFF))
    case.assert_same(off, tapered)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("correction", [TOPR, "algorithm.correction.kind=truncate", OFF])
def test_the_weight_of_negatives_is_that_of_a_loss_of_your_own(folder: Path, kind: str, correction: str) -> None:
    shared = correction, f"algorithm.advantage.kind={kind}", "learner.minibatches=2", "learner.lr=0.01"
    own = f"algorithm.policy_loss={{kind='function', function='{SIGN_LOSS}:loss'}}"
    ours, theirs, full = (case.updated(folder, pad(case.batch()), *shared, *more) for more in ((QUARTER,), (own,), ()))
    for name in [name for name in ours[1] if name.startswith("clip_fraction")]:
        del ours[1][name]
    case.assert_same(ours, theirs)
    with pytest.raises(AssertionError):
        case.assert_same_weights(ours[0], full[0])


def test_positives_alone_leave_the_entropy_bonus_of_negatives(folder: Path) -> None:
    """With nothing but negative advantages and a weight of 0 the bonus alone is left, as with advantages of 0."""
    shared = "algorithm.entropy=0.1", "learner.lr=0.01", "algorithm.zero_variance=keep"
    batch = case.batch()
    equal = pad(replace(batch, trajectories=tuple(replace(one, reward=0.5) for one in batch.trajectories)))
    none = case.updated(folder, equal, *shared, "algorithm.advantage.kind=dr_grpo")
    shifted = "algorithm.advantage={kind='dr_grpo', baseline_shift=0.2}"
    silent = case.updated(folder, equal, *shared, shifted, "algorithm.negative_weight=0")
    loud = case.updated(folder, equal, *shared, shifted)
    case.assert_same_weights(none[0], silent[0], atol=1e-7)
    assert silent[1]["steps"] == 1
    with pytest.raises(AssertionError):
        case.assert_same_weights(none[0], loud[0])


def test_a_weight_of_one_changes_no_bit(folder: Path) -> None:
    one, other = (case.updated(folder, pad(case.batch()), *more) for more in ((), ("algorithm.negative_weight=1",)))
    assert all(torch.equal(tensor, other[0][name]) for name, tensor in one[0].items())
