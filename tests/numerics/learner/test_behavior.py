"""One ratio, current / behavior: no pass before the first step, no weight beside it, and numbers by hand.

In the example by hand the policy is a table of the probabilities BEFORE until the first step, and AFTER from then on.
"""

import math
from pathlib import Path

import learner_case as case
import pytest
import table_policy as tables
import torch
from conftest import trajectory

from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model.policy import PolicyOutput
from streamppo.learner.update import Updater
from streamppo.types import Batch

pytestmark = pytest.mark.usefixtures("alone")

GROUPS = "algorithm.advantage.kind=rloo"
OWN_CRITIC = "algorithm.critic.model=policy"
OFF = "algorithm.correction.kind=off"
BEHAVIOR = ("algorithm.proximal=behavior", OFF)
WHOLE = "learner.micro_batch_tokens=100000"
STEPS = ("learner.epochs=2", "learner.minibatches=2")
LEARNER_SEEN = ("ess", "behavior_kl", "behavior_kl_k1", "chi2_sequence", "mismatch", "log_ppl_learner")


# --- passes --------------------------------------------------------------------------------------------------


def passes(folder: Path, *overrides: str) -> list[str]:
    """The part that each forward pass of one update computed."""
    updater = case.updater(case.config_of(WHOLE, *overrides), folder)
    parts: list[str] = []
    updater.policy.register_forward_pre_hook(lambda _, arguments: parts.append(arguments[1]))
    updater.update(pad(case.batch()))
    return parts


def test_the_policy_makes_one_pass_less_than_with_recomputed_log_probs(folder: Path) -> None:
    assert passes(folder, GROUPS, *STEPS) == ["policy"] * 5
    assert passes(folder, GROUPS, *STEPS, *BEHAVIOR) == ["policy"] * 4
    assert passes(folder, OWN_CRITIC, *STEPS, *BEHAVIOR) == ["critic"] + ["policy"] * 4 + ["critic"] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choices", "first"),
    [
        ([], "both"),
        ([GROUPS, "algorithm.kl.reward_beta=0.1"], "policy"),
        ([OWN_CRITIC, "algorithm.advantage.kind=vtrace"], "both"),
    ],
)
def test_the_value_head_v_trace_and_the_kl_in_the_reward_are_about_the_learner_and_need_its_pass(
    folder: Path, choices: list[str], first: str
) -> None:
    assert passes(folder, *choices, *STEPS, *BEHAVIOR)[0] == first
    scored: list[PolicyOutput] = []
    for proximal in ("recompute", "behavior"):
        updater = case.updater(case.config_of(*choices, *STEPS, f"algorithm.proximal={proximal}", OFF), folder)
        updated = updater.update(pad(case.batch()))
        scored.append(updated.targets.scored)
        torch.testing.assert_close(updated.targets.scored.logprobs_BT, scored[0].logprobs_BT, rtol=0, atol=0)
    assert scored[0].logprobs_BT.any()


# --- special cases -------------------------------------------------------------------------------------------


def exact(updater: Updater, *, min_version: int = 0) -> PaddedBatch:
    """A batch of lag 0 that an exact engine sampled with the updater's own weights."""
    batch = pad(case.batch(min_version=min_version))
    with torch.no_grad():
        current = updater.policy(batch, "policy")
    return batch._replace(
        behavior_logprobs_BT=current.logprobs_BT.detach().clone(), lag_BT=torch.zeros_like(batch.lag_BT)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("choices", [[], STEPS, [GROUPS, "learner.epochs=3"], [OWN_CRITIC]], ids=" ".join)
def test_at_lag_0_with_an_exact_engine_it_is_the_update_with_recomputed_log_probs(
    folder: Path, choices: list[str]
) -> None:
    parameters, metrics = [], []
    for proximal in ("recompute", "behavior"):
        config = case.config_of(*choices, WHOLE, f"algorithm.proximal={proximal}", OFF)
        updater = case.updater(config, folder)
        metrics.append(case.metrics(updater, exact(updater)))
        parameters.append(case.whole(updater.policy))
    for name, tensor in parameters[0].items():
        torch.testing.assert_close(parameters[1][name], tensor, rtol=0, atol=1e-6)
    for name in metrics[0].keys() - {"score_s", "train_s"}:
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-5, abs=1e-6), name


def test_target_kl_ends_an_update_on_fresh_data_as_it_does_with_recomputed_log_probs(folder: Path) -> None:
    config = case.config_of(
        GROUPS, *BEHAVIOR, WHOLE, "learner.epochs=4", "learner.lr=0.01", "algorithm.target_kl=0.001", "queue.max_lag=0"
    )
    updater = case.updater(config, folder)
    metrics = case.metrics(updater, exact(updater))
    assert metrics["stopped_early"] == 1
    assert 1 <= metrics["steps"] < 4


def test_places_that_the_policy_did_not_sample_change_nothing(folder: Path) -> None:
    results = []
    for hole in (0.0, math.nan):
        updater = case.updater(case.config_of(GROUPS, *STEPS, *BEHAVIOR), folder)
        batch = pad(case.batch())
        assert not batch.mask_BT.all()
        behavior_BT = batch.behavior_logprobs_BT.masked_fill(~batch.mask_BT, hole)
        metrics = case.metrics(updater, batch._replace(behavior_logprobs_BT=behavior_BT))
        results.append((case.whole(updater.policy), metrics["policy_loss"]))
    assert results[0][1] == results[1][1] != 0
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])


@pytest.mark.parametrize("choices", [[GROUPS], [], [OWN_CRITIC]], ids=["groups", "head", "own critic"])
def test_diagnostics_compare_behavior_with_the_learner_before_its_first_step(folder: Path, choices: list[str]) -> None:
    """Against the proximal policy, which is behavior, no engine would ever mismatch."""
    metrics = [
        case.metrics(
            case.updater(case.config_of(*choices, "learner.epochs=2", f"algorithm.proximal={kind}", OFF), folder),
            pad(case.batch()),
        )
        for kind in ("recompute", "behavior")
    ]
    assert metrics[0]["mismatch"] > 0.1
    for name in LEARNER_SEEN:
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-5, abs=1e-6), name


def test_with_a_value_head_they_are_of_before_the_first_step_though_later_minibatches_pass_after_it(
    folder: Path,
) -> None:
    choices = ("learner.minibatches=4", "learner.lr=0.01")
    recomputed, behavior = (
        case.metrics(case.updater(case.config_of(*choices, f"algorithm.proximal={kind}", OFF), folder), batch)
        for kind, batch in (("recompute", pad(case.batch())), ("behavior", pad(case.batch())))
    )
    for name in LEARNER_SEEN:
        assert behavior[name] == pytest.approx(recomputed[name], rel=1e-6), name


# --- by hand -------------------------------------------------------------------------------------------------

BEFORE, AFTER, VALUES = [1 / 8, 1 / 8, 1 / 4, 1 / 2], [1 / 4] * 4, [0.0] * 4
LN2 = math.log(2)


def answers() -> PaddedBatch:
    """A right answer of two tokens and a wrong one of one; current / behavior behind each."""
    made = [
        ([3, 2], [1 / 2, 1 / 8], 1.0),  # 1, 2
        ([1], [1 / 4], 0.0),  # 1/2
    ]
    rows = [
        trajectory(
            tokens,
            prompt=[0],
            number=0,
            sample=row,
            versions=[1] * len(tokens),
            logprobs=[math.log(probability) for probability in behavior],
            reward=reward,
        )
        for row, (tokens, behavior, reward) in enumerate(made)
    ]
    return pad(Batch(version=3, min_version=0, trajectories=tuple(rows)))


def by_hand(*overrides: str) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics, and the gradient of the last step. Advantages are 1, 1 and -1."""
    config = case.config_of(GROUPS, *BEHAVIOR, "learner.max_grad_norm=1000", "algorithm.entropy=0", *overrides)
    policy = tables.TablePolicy(BEFORE, VALUES)
    script = tables.Scripted(policy, [(AFTER, VALUES)] if config.learner.epochs == 2 else [])
    metrics = case.metrics(tables.updater(config, policy, None, script), answers())
    assert policy.lm.logits_V.grad is not None
    assert policy.passes == ["policy"] * config.learner.epochs
    return metrics, policy.lm.logits_V.grad


def test_the_clip_binds_current_over_behavior_and_no_other_weight_is_applied() -> None:
    """Losses are -1, -1.2 (from 2, clipped) and 0.8 (from 1/2, clipped): only the first has a gradient."""
    metrics, gradient_V = by_hand()
    assert metrics["policy_loss"] == pytest.approx((-1 - 1.2 + 0.8) / 3)
    assert (metrics["clip_fraction_high"], metrics["clip_fraction_low"]) == pytest.approx((1 / 3, 1 / 3))
    torch.testing.assert_close(gradient_V, torch.tensor([1 / 24, 1 / 24, 1 / 12, -1 / 6]), rtol=0, atol=1e-6)


def test_unclipped_the_gradient_is_that_of_importance_sampling() -> None:
    """Gradients of -A r are -A r (e_token - p): with weights 1, 2 and -1/2 for the tokens 3, 2 and 1."""
    metrics, gradient_V = by_hand("algorithm.policy_loss.kind=importance_weighted")
    assert metrics["policy_loss"] == pytest.approx((-1 - 2 + 0.5) / 3)
    weights_V, p_V = torch.tensor([0.0, -0.5, 2.0, 1.0]), torch.tensor(BEFORE)
    torch.testing.assert_close(gradient_V, (weights_V.sum() * p_V - weights_V) / 3, rtol=0, atol=1e-6)


def test_dppo_drops_tokens_whose_probability_left_that_of_the_policy_that_sampled_them() -> None:
    """Two tokens moved by 1/8 in the direction of their advantages before the update began, and one stood still."""
    loss = "algorithm.policy_loss={{kind='dppo_tv', delta={}}}"
    near, _ = by_hand(loss.format(0.1))
    far, _ = by_hand(loss.format(0.15))
    assert near["policy_loss"] == pytest.approx(-1 / 3)
    assert near["clip_fraction_high"] + near["clip_fraction_low"] == pytest.approx(2 / 3)
    assert far["policy_loss"] == pytest.approx((-1 - 2 + 0.5) / 3)
    recomputed, _ = by_hand(loss.format(0.1), "algorithm.proximal=recompute")
    assert recomputed["clip_fraction_high"] + recomputed["clip_fraction_low"] == 0


def test_proximal_kl_is_of_age_and_movement_and_behavior_kl_of_age_alone() -> None:
    """Ratios are 1, 2, 1/2 in the first pass and 1/2, 2, 1 in the second; k3 is r - 1 - log r."""
    metrics, _ = by_hand("learner.epochs=2")
    assert metrics["behavior_kl"] == pytest.approx(0.5 / 3)
    assert metrics["behavior_kl_k1"] == pytest.approx(0, abs=1e-6)
    assert metrics["ess"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert metrics["proximal_kl"] == pytest.approx((0.5 + 0.5) / 6)
    assert (metrics["ratio_p01"], metrics["ratio_p50"], metrics["ratio_p99"]) == pytest.approx((0.5, 1, 2))
