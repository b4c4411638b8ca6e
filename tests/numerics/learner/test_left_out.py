"""Filters and rules that reject, in whole updates: their shares by hand, what they leave alone, and nothing left.

In the table policy, tokens have the probabilities BEFORE until the first step, and 1/4 each from then on.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import learner_case as case
import msgspec
import pytest
import table_policy as tables
import torch
from conftest import trajectory

from streamppo.algorithms.advantages import AdvantageEstimate
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.objective import objective
from streamppo.learner.update import Updater
from streamppo.telemetry.catalogue import SOMETIMES
from streamppo.types import Batch

BEFORE, AFTER = [1 / 8, 1 / 8, 1 / 4, 1 / 2], [1 / 4] * 4
LN2 = math.log(2)
PLAIN = (
    "algorithm.advantage.kind=dr_grpo",
    "algorithm.correction.kind=off",
    "algorithm.whiten.over=off",
    "algorithm.entropy=0",
)
DRIFTED = "algorithm.filters=[{kind='off_policy_negative', delta=0.5}]"
CUT_OFF = "algorithm.filters=[{kind='truncated'}]"
BOTH = "algorithm.filters=[{kind='truncated'}, {kind='off_policy_negative', delta=0.5}]"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group for all tests of this file."""
    with case.group(0, 1, tmp_path_factory.mktemp("group") / "store"):
        yield


def rows() -> PaddedBatch:
    """Two prompts of two answers, six sampled tokens; advantages are -1/2 and 1/2, and 1/2 and -1/2."""
    made = [
        # tokens, log2 of behavior, mask, reward, finish: mean log2(behavior / current) in the two passes
        ([3, 3], [-1, -1], [1, 1], 0.0, "stop"),  # 0, 1
        ([2], [-1], [1], 1.0, "length"),  # 1, 1
        ([0], [0], [1], 1.0, "stop"),  # 3, 2
        ([0, 2, 1], [-1, 0, -1], [1, 0, 1], 0.0, "length"),  # 2, 1
    ]
    trajectories = [
        trajectory(
            tokens,
            prompt=[0],
            number=row // 2,
            sample=row % 2,
            versions=[3] * len(tokens),
            logprobs=[power * LN2 for power in powers],
            mask=[bool(bit) for bit in mask],
            reward=reward,
            finish=finish,
        )
        for row, (tokens, powers, mask, reward, finish) in enumerate(made)
    ]
    return pad(Batch(version=3, min_version=2, trajectories=tuple(trajectories)))


def metrics(*overrides: str, batch: PaddedBatch | None = None) -> dict[str, float]:
    policy = tables.TablePolicy(BEFORE, [0.0] * 4)
    updater = tables.updater(
        case.config_of(*PLAIN, *overrides), policy, None, tables.Scripted(policy, [(AFTER, [0.0] * 4)])
    )
    return case.metrics(updater, rows() if batch is None else batch)


def rejecting(*rules: str) -> str:
    return f"algorithm.correction={{kind='reject', reject=[{', '.join(rules)}]}}"


SHARES: dict[str, tuple[str, float, float]] = {
    # ratios are 1, 1; 1/2; 1/8; 1/4, 1/4
    "rejected_token": (rejecting("{kind='token', band=[0.2, 2.0]}"), 1 / 6, 1 / 4),
    "rejected_sequence": (rejecting("{kind='sequence', band=[0.1, 2.0]}"), 2 / 6, 1 / 4),
    "rejected_geometric": (rejecting("{kind='geometric', band=[0.2, 2.0]}"), 1 / 6, 1 / 4),
    "rejected_outlier": (rejecting("{kind='outlier', band=[0.3, 2.0]}"), 3 / 6, 2 / 4),
    # 0, ln 2 - 1/2 = 0.19, 3 ln 2 - 7/8 = 1.2, 2 ln 2 - 3/4 = 0.64
    "rejected_k3": (rejecting("{kind='k3', at_most=0.7}"), 1 / 6, 1 / 4),
    "rejected_mask": ("algorithm.correction={kind='mask', band=[0.2, 2.0]}", 1 / 6, 1 / 4),
    "rejected_second_moment": ("algorithm.correction={kind='second_moment', threshold=0.01}", 4 / 6, 3 / 4),
    "rejected_function": (
        f"algorithm.correction={{kind='function', function='{Path(__file__)}:drop_small'}}",
        3 / 6,
        2 / 4,
    ),
    "filtered_truncated": (CUT_OFF, 3 / 6, 2 / 4),
}


def drop_small(inputs: object) -> torch.Tensor:
    """Weight 1 for ratios of at least 0.3, else 0."""
    return (inputs.ratio_BT >= 0.3).float()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("name", SHARES)
def test_the_share_of_a_rule_is_of_sampled_tokens_and_of_responses(name: str, epochs: int) -> None:
    override, of_tokens, of_responses = SHARES[name]
    found = metrics(override, f"learner.epochs={epochs}")
    assert found[name] == pytest.approx(of_tokens)
    assert found[f"{name}_responses"] == pytest.approx(of_responses)
    assert name.startswith(tuple(SOMETIMES))
    assert sum(one.startswith(("filtered_", "rejected_")) for one in found) == 2


@pytest.mark.usefixtures("group")
def test_drifted_negative_responses_are_found_by_the_current_policy_of_each_pass() -> None:
    """Pass 1 leaves out the last response; in pass 2 the first has drifted too. A positive one stays, however far."""
    assert [metrics(DRIFTED)[f"filtered_off_policy_negative{end}"] for end in ("", "_responses")] == [2 / 6, 1 / 4]
    found = metrics(DRIFTED, "learner.epochs=2")
    assert found["filtered_off_policy_negative"] == pytest.approx((2 + 4) / 12)
    assert found["filtered_off_policy_negative_responses"] == pytest.approx((1 + 2) / 8)
    # -A r: 1/2, 1/2; -1/2; -1/2 and left out. Then left out; -1/2; -1/2 of a ratio of 2, clipped to 1.2; left out.
    assert found["policy_loss"] == pytest.approx((0 + (-0.5 - 0.6)) / 6 / 2)
    assert (found["steps"], found["empty_steps"]) == (2, 0)


@pytest.mark.usefixtures("group")
def test_filters_and_rules_are_counted_each_by_itself() -> None:
    found = metrics(BOTH, rejecting("{kind='outlier', band=[0.3, 2.0]}", "{kind='token', band=[0.2, 2.0]}"))
    assert found["filtered_truncated"] == found["rejected_outlier"] == pytest.approx(3 / 6)
    assert found["filtered_off_policy_negative"] == pytest.approx(2 / 6)
    assert found["rejected_token"] == pytest.approx(1 / 6)
    assert found["tokens_trained"] == 3
    # The first response is left, with -A = 1/2 at both tokens; all six tokens are in the denominator.
    assert found["policy_loss"] == pytest.approx(1 / 6)


@pytest.mark.usefixtures("group")
def test_a_cut_off_completion_stays_in_its_group_and_in_the_denominator() -> None:
    """Its mate has the advantage that it has beside it: -1/2 at two tokens of six."""
    assert metrics(CUT_OFF)["policy_loss"] == pytest.approx((2 * 0.5 - 0.5) / 6)


# --- what is left alone --------------------------------------------------------------------------------------


def poisoned(updater: Updater, change: Callable[[PaddedBatch, AdvantageEstimate], AdvantageEstimate]) -> None:
    real = updater.objective.advantages
    updater.objective = updater.objective._replace(
        advantages=lambda padded, scored, rewards_BT: change(padded, real(padded, scored, rewards_BT))
    )


def trained(
    folder: Path, change: Callable[[PaddedBatch, AdvantageEstimate], AdvantageEstimate], *overrides: str
) -> dict[str, torch.Tensor]:
    updater = case.updater(case.config_of(*overrides), folder)
    poisoned(updater, change)
    updater.update(pad(case.batch()))
    return case.whole(updater.policy)


@pytest.mark.usefixtures("group")
def test_neither_policy_nor_critic_learns_from_a_cut_off_completion(folder: Path) -> None:
    def poison(padded: PaddedBatch, estimate: AdvantageEstimate) -> AdvantageEstimate:
        return AdvantageEstimate(*(column.masked_fill(padded.truncated_B[:, None], 1e6) for column in estimate))

    clean = trained(folder, lambda _, estimate: estimate, CUT_OFF, "algorithm.entropy=0.1")
    found = trained(folder, poison, CUT_OFF, "algorithm.entropy=0.1")
    assert pad(case.batch()).truncated_B.any()
    assert all(torch.equal(clean[name], found[name]) for name in clean)


@pytest.mark.usefixtures("group")
def test_a_drifted_negative_response_leaves_the_surrogate_and_stays_for_entropy_kl_and_critic(folder: Path) -> None:
    """Its advantage in the surrogate is as good as 0, and everything else is as without the filter."""
    drift = "algorithm.filters=[{kind='off_policy_negative', delta=1e-6}]"
    common = ("algorithm.entropy=0.1", "algorithm.kl.loss_beta=0.1", "algorithm.whiten.over=off")
    updater = case.updater(case.config_of(*common), folder)
    batch = pad(case.batch())
    with torch.no_grad():
        logprobs_BT = updater.policy(batch, "both").logprobs_BT
    drift_BT = (batch.behavior_logprobs_BT - logprobs_BT).masked_fill(~batch.mask_BT, 0.0)
    far_B = drift_BT.sum(-1) / batch.mask_BT.sum(-1) > 1e-6

    def sign(padded: PaddedBatch, estimate: AdvantageEstimate) -> AdvantageEstimate:
        return estimate._replace(advantages=torch.where(far_B[:, None], -1e3, estimate.advantages.abs()))

    def without(padded: PaddedBatch, estimate: AdvantageEstimate) -> AdvantageEstimate:
        return estimate._replace(advantages=torch.where(far_B[:, None], 0.0, estimate.advantages.abs()))

    assert far_B.any() and not far_B.all()
    filtered, expected = trained(folder, sign, drift, *common), trained(folder, without, *common)
    assert all(torch.equal(expected[name], filtered[name]) for name in expected)


# --- nothing left --------------------------------------------------------------------------------------------


def all_alike(*, finish: str, reward: float) -> PaddedBatch:
    batch = case.batch(version=4)
    changed = [msgspec.structs.replace(one, finish=finish, reward=reward) for one in batch.trajectories]
    return pad(Batch(version=4, min_version=batch.min_version, trajectories=tuple(changed)))


def steps_of(updater: Updater) -> list[int]:
    return [int(state["step"]) for state in updater.optimizer.state_dict()["state"].values()]


NOTHING: dict[str, tuple[list[str], PaddedBatch]] = {
    "filtered": ([CUT_OFF], all_alike(finish="length", reward=1.0)),
    "rejected": (
        ["algorithm.advantage.kind=rloo", rejecting("{kind='k3', at_most=1e-12}")],
        all_alike(finish="stop", reward=1.0),
    ),
    "equal groups": (
        ["algorithm.advantage.kind=grpo", "algorithm.zero_variance=mask"],
        all_alike(finish="stop", reward=1.0),
    ),
    "too old": ([], pad(case.batch(version=4, min_version=5))),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("name", NOTHING)
def test_an_update_of_which_nothing_is_left_makes_no_step_and_says_so(
    folder: Path, name: str, minibatches: int, logged: pytest.LogCaptureFixture
) -> None:
    """AdamW has moments of an update before: a step with a gradient of 0 would move the policy all the same."""
    overrides, batch = NOTHING[name]
    updater = case.updater(case.config_of(f"learner.minibatches={minibatches}", *overrides), folder)
    updater.optimizer = torch.optim.AdamW(updater.policy.parameters(), lr=0.01, weight_decay=0.1)
    chosen, updater.objective = updater.objective, objective.build(case.config_of("algorithm.advantage.kind=rloo"))
    updater.update(pad(case.batch()))
    updater.objective = chosen
    weights, steps = case.whole(updater.policy), steps_of(updater)
    found = case.metrics(updater, batch)
    after = case.whole(updater.policy)
    assert all(torch.equal(weights[one], after[one]) for one in weights)
    assert set(steps) == {1} and steps_of(updater) == steps
    assert (found["steps"], found["empty_steps"], found["grad_norm"]) == (0, minibatches, 0)
    assert all(math.isfinite(number) for number in found.values())
    told = [line.getMessage() for line in logged.records if line.levelno == logging.WARNING]
    assert [text for text in told if f"batch 4: {minibatches} of {minibatches} optimizer steps were skipped:" in text]


@pytest.mark.usefixtures("group")
def test_many_batches_with_skipped_steps_are_a_few_lines(folder: Path, logged: pytest.LogCaptureFixture) -> None:
    """A model that has learned its task has equal groups in most batches, which is no news after the first."""
    overrides, batch = NOTHING["equal groups"]
    updater = case.updater(case.config_of("learner.minibatches=1", *overrides), folder)
    for _ in range(9):
        updater.update(batch)
    told = [text for text in logged.messages if "optimizer steps were skipped" in text]
    before = [int(found[1]) if (found := re.search(r"as in (\d+) of the batches before", text)) else 0 for text in told]
    assert before == [0, 1, 3, 7]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("correction", [rejecting("{kind='k3', at_most=0.1}"), "algorithm.correction.kind=mask"])
def test_log_probs_that_are_not_numbers_make_bad_steps_and_no_empty_ones(folder: Path, correction: str) -> None:
    chosen = ("algorithm.advantage.kind=rloo", DRIFTED, correction, "learner.max_bad_steps=2")
    updater = case.updater(case.config_of(*chosen), folder)
    with torch.no_grad():
        next(updater.policy.lm.parameters()).fill_(torch.nan)
    found = case.metrics(updater, pad(case.batch()))
    assert (found["bad_steps"], found["empty_steps"], found["steps"]) == (1, 0, 0)


@pytest.mark.usefixtures("group")
def test_a_critic_learns_where_nothing_is_left_for_the_policy(folder: Path) -> None:
    updater = case.updater(case.config_of(rejecting("{kind='k3', at_most=1e-12}")), folder)
    found = case.metrics(updater, pad(case.batch()))
    assert (found["steps"], found["empty_steps"], found["policy_loss"]) == (1, 0, 0)
    assert found["value_loss"] > 0 and found["grad_norm"] > 0
