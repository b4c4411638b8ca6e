"""Proximal log-probs: from a pass over the batch, in passing where an update is one step, or interpolated by age."""

from pathlib import Path

import learner_case as case
import numpy as np
import pytest
import torch

from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.types import Batch

pytestmark = pytest.mark.usefixtures("alone")

GROUPS = "algorithm.advantage.kind=rloo"
LOGLINEAR = "algorithm.proximal=loglinear"
WHOLE = "learner.micro_batch_tokens=100000"
LEARNER_SEEN = ("ess", "behavior_kl", "behavior_kl_k1", "chi2_sequence", "mismatch", "log_ppl_learner")


def passes(folder: Path, *overrides: str) -> list[str]:
    """The part that each forward pass of one update computed."""
    updater = case.updater(case.config_of(*overrides), folder)
    parts: list[str] = []
    updater.policy.register_forward_pre_hook(lambda _, arguments: parts.append(arguments[1]))
    updater.update(pad(case.batch()))
    return parts


def test_only_what_must_be_known_before_the_first_step_costs_a_pass(folder: Path) -> None:
    four_steps = ("learner.epochs=2", "learner.minibatches=2", WHOLE)
    assert passes(folder, GROUPS, *four_steps) == ["policy"] * 5
    assert passes(folder, GROUPS, LOGLINEAR, *four_steps) == ["policy"] * 4
    own = "algorithm.critic.model=policy"
    assert passes(folder, own, *four_steps) == ["both"] + ["policy"] * 4 + ["critic"] * 4
    assert passes(folder, own, LOGLINEAR, *four_steps) == ["critic"] + ["policy"] * 4 + ["critic"] * 4


def test_an_update_of_one_step_makes_each_policy_pass_once_whatever_the_micro_batches(folder: Path) -> None:
    split = "learner.micro_batch_tokens=40"
    pieces = len(passes(folder, GROUPS, split))
    assert pieces > 1
    assert passes(folder, GROUPS, "learner.epochs=2", split) == ["policy"] * 3 * pieces
    assert passes(folder, "algorithm.critic.model=policy", split) == (
        ["critic"] * pieces + ["policy"] * pieces + ["critic"] * pieces
    )
    assert passes(folder, split) == ["both"] * 2 * pieces
    assert passes(folder, WHOLE) == ["both"]


def ragged() -> PaddedBatch:
    """A batch whose rows have 6 to 204 tokens."""
    generator, lengths = np.random.default_rng(0), (200, 3, 2, 190, 4, 2, 3, 2)
    made = [case.drawn_row(generator, row, 3, 4, np.ones(length, bool)) for row, length in enumerate(lengths)]
    return pad(Batch(version=3, min_version=0, trajectories=tuple(made)))


@pytest.mark.parametrize("more", [(), ("model.dtype=bfloat16",), ("algorithm.advantage.kind=vtrace",)])
def test_micro_batches_that_fit_into_one_pass_keep_their_graphs_for_the_one_step(
    folder: Path, more: tuple[str, ...]
) -> None:
    """The two long rows are apart, and with the six short ones, padded to 8, they have 456 tokens."""
    updaters = {
        budget: case.updater(case.config_of(*more, f"learner.micro_batch_tokens={budget}"), folder)
        for budget in (430, 460, 100_000)
    }
    parts: dict[int, list[str]] = {budget: [] for budget in updaters}
    for budget, updater in updaters.items():
        updater.policy.register_forward_pre_hook(lambda _, given, made=parts[budget]: made.append(given[1]))
        updater.update(ragged())
    assert {budget: len(made) for budget, made in parts.items()} == {430: 4, 460: 2, 100_000: 2}
    atol = 2e-6 if not more or "dtype" not in more[0] else 2e-3
    for name, tensor in case.whole(updaters[430].policy).items():
        for other in (460, 100_000):
            torch.testing.assert_close(case.whole(updaters[other].policy)[name], tensor, rtol=0, atol=atol)


def test_the_one_pass_of_policy_and_critic_serves_the_policys_step_alone(folder: Path) -> None:
    own = ("algorithm.critic.model=policy", "algorithm.advantage.kind=vtrace")
    assert passes(folder, *own, WHOLE) == ["both", "critic"]
    whole, split = (
        case.updater(case.config_of(*own, budget), folder) for budget in (WHOLE, "learner.micro_batch_tokens=40")
    )
    for updater in (whole, split):
        updater.update(pad(case.batch()))
    for name, tensor in case.whole(split.policy).items():
        torch.testing.assert_close(case.whole(whole.policy)[name], tensor, rtol=0, atol=2e-6)


def test_in_passing_is_the_same_update_as_with_a_pass_of_its_own(folder: Path) -> None:
    one = case.updater(case.config_of(GROUPS, "learner.micro_batch_tokens=40"), folder)
    two = case.updater(case.config_of(GROUPS, "learner.micro_batch_tokens=40"), folder)
    assert one.objective.anchor is not None
    two.objective = two.objective._replace(anchor=None, scored="policy")
    metrics, expected = (case.metrics(updater, pad(case.batch())) for updater in (one, two))
    for name, tensor in case.whole(two.policy).items():
        torch.testing.assert_close(case.whole(one.policy)[name], tensor, rtol=0, atol=1e-7)
    for name in expected.keys() - {"score_s", "train_s"}:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_loglinear_lies_between_behavior_and_current_by_age_in_losses_and_weights(folder: Path) -> None:
    updater = case.updater(case.config_of(GROUPS, LOGLINEAR, "learner.epochs=3", "learner.lr=0.01", WHOLE), folder)
    batch, seen, corrected = pad(case.batch()), [], []
    order = torch.argsort(batch.start_B + batch.length_B, descending=True, stable=True)
    behavior_BT, lag_BT, mask_BT = (
        column[order] for column in (batch.behavior_logprobs_BT, batch.lag_BT, batch.mask_BT)
    )
    assert set(lag_BT[mask_BT].tolist()) >= {0, 1, 2}
    loss, correct = updater.objective.policy_loss, updater.objective.correct

    def spied_loss(logprobs_BT, proximal_BT, *rest):
        seen.append((logprobs_BT.detach(), proximal_BT))
        return loss(logprobs_BT, proximal_BT, *rest)

    def spied_correct(proximal_BT, *rest):
        corrected.append(proximal_BT)
        return correct(proximal_BT, *rest)

    updater.objective = updater.objective._replace(policy_loss=spied_loss, correct=spied_correct)
    updater.update(batch)
    assert len(seen) == len(corrected) == 3
    for (logprobs_BT, proximal_BT), weighted_BT in zip(seen, corrected, strict=True):
        for row, place in mask_BT.nonzero().tolist():
            lag = lag_BT[row, place].item()
            expected = (behavior_BT[row, place] + lag * logprobs_BT[row, place]) / (lag + 1)
            assert proximal_BT[row, place].item() == pytest.approx(expected.item(), abs=1e-5)
        assert not proximal_BT.requires_grad
        assert torch.equal(weighted_BT, proximal_BT)
    assert not torch.equal(seen[0][1], seen[2][1])


def test_diagnostics_compare_behavior_with_the_learner_and_not_with_the_interpolation(folder: Path) -> None:
    """At lag 0 the interpolation is the behavior policy: against it no engine would ever mismatch."""
    metrics = [
        case.metrics(case.updater(case.config_of(GROUPS, "learner.epochs=2", choice), folder), pad(case.batch()))
        for choice in ("algorithm.proximal=recompute", LOGLINEAR)
    ]
    assert metrics[0]["mismatch"] > 0.1
    for name in LEARNER_SEEN:
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-5, abs=1e-6), name
