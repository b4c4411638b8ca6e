"""A segment teaches as the whole does, with the critic's value at the cut in place of the rest."""

from pathlib import Path

import learner_case as case
import pytest
import torch
from conftest import trajectory
from msgspec import structs

from streamppo.algorithms.advantages import outcomes_explained
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model.policy import empty_output
from streamppo.learner.objective import objective
from streamppo.learner.objective.metrics import describe
from streamppo.learner.update import Updater
from streamppo.types import Batch, Trajectory

GAMMA, LAM = 0.9, 0.8
TOKENS = [5, 6, 7, 8, 9, 10, 11]
VALUES = [0.3, -0.2, 0.5, 0.1, 0.4, -0.6, 0.2]
"""The critic's values before each token; that before token 3 is the one at a cut behind token 2."""


def segments(*cuts: int) -> list[Trajectory]:
    """One completion with a reward of 2 at its end, in segments that begin at 0 and at `cuts`."""
    begins, made = [0, *cuts], list[Trajectory]()
    for number, (begin, end) in enumerate(zip(begins, [*cuts, len(TOKENS)], strict=True)):
        is_last = end == len(TOKENS)
        one = trajectory(
            TOKENS[begin:end],
            prompt=[3, 4, *TOKENS[:begin]],
            reward=2.0 if is_last else 0.0,
            finish="stop" if is_last else "cut",
        )
        identity = structs.replace(one.identity, segment=number)
        made.append(structs.replace(one, identity=identity, prefix=begin))
    return made


def packed(*trajectories: Trajectory) -> PaddedBatch:
    return pad(Batch(version=0, min_version=0, trajectories=trajectories))


def advantages(one: Trajectory, kind: str, lam: float = LAM) -> list[float]:
    """The advantages of its tokens, with the values of all tokens fixed."""
    choice = f"algorithm.advantage={{kind = '{kind}', gamma = {GAMMA}, lam = {lam}}}"
    estimate = objective.build(case.config_of(choice, "algorithm.whiten.over=off")).advantages
    batch, begin, end = packed(one), one.prefix, one.prefix + one.num_tokens
    behind = VALUES[end] if end < len(VALUES) else 100.0
    scored = empty_output(batch)._replace(
        values_BT=torch.tensor([VALUES[begin:end]]), bootstrap_B=torch.tensor([behind])
    )
    return estimate(batch, scored, batch.rewards_BT)[0][0].tolist()


@pytest.mark.parametrize("kind", ["gae", "vtrace"])
@pytest.mark.parametrize("cuts", [(3,), (1, 2, 6), (1, 2, 3, 4, 5, 6)])
def test_chained_segments_are_the_whole_trajectory_exactly(kind: str, cuts: tuple[int, ...]) -> None:
    """A(t) of the whole = A(t) of the segment + (gamma lam)^(cut - t) A(cut); so with lam = 0 they are equal."""
    (whole,) = segments()
    expected, found = advantages(whole, kind), [advantages(one, kind) for one in segments(*cuts)]
    behind = 0.0
    for one, own in zip(reversed(segments(*cuts)), reversed(found), strict=True):
        decayed = [(GAMMA * LAM) ** (len(own) - place) * behind for place in range(len(own))]
        chained = [a + b for a, b in zip(own, decayed, strict=True)]
        assert chained == pytest.approx(expected[one.prefix : one.prefix + len(own)], abs=1e-6)
        behind = chained[0]
    td = [number for one in segments(*cuts) for number in advantages(one, kind, lam=0.0)]
    if kind == "gae":
        assert td == pytest.approx(advantages(whole, kind, lam=0.0), abs=1e-6)


@pytest.mark.usefixtures("alone")
def test_a_segment_is_scored_behind_all_tokens_before_it(folder: Path) -> None:
    """Log-probs and values are those of its place in the whole, and the value at the cut is that of the next token."""
    policy = case.updater(case.config_of(), folder).policy
    with torch.no_grad():
        policy.value_head.weight.fill_(0.1)
        whole, *parts = (policy(packed(one), "both") for one in (*segments(), *segments(2, 5)))
    for one, scored in zip(segments(2, 5), parts, strict=True):
        place = slice(one.prefix, one.prefix + one.num_tokens)
        assert torch.allclose(scored.logprobs_BT[0], whole.logprobs_BT[0, place], atol=1e-5)
        assert torch.allclose(scored.values_BT[0], whole.values_BT[0, place], atol=1e-5)
        if one.finish == "cut":
            assert torch.allclose(scored.bootstrap_B[0], whole.values_BT[0, place.stop], atol=1e-5)


def test_metrics_of_completions_are_of_those_that_ended() -> None:
    first, second, last = segments(2, 5)
    ended = packed(first, second, last, trajectory([5, 6], number=1, finish="length"))
    told = describe(ended, ended.fresh_BT)
    assert (told["reward"], told["length"], told["truncated"]) == (1.0, (7 + 2) / 2, 0.5)
    assert told["segments_cut"] == 0.5
    going_on = packed(first, second)
    assert "reward" not in describe(going_on, going_on.fresh_BT)
    whole = packed(trajectory([5, 6]))
    assert "segments_cut" not in describe(whole, whole.fresh_BT)


def explained(values: list[list[float]], ended: list[bool], gamma: float = 1.0) -> float:
    """The explained share of a critic with these values, for completions of two tokens with the outcomes 0 and 1."""
    rewards_BT, mask_BT = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool)
    return outcomes_explained(rewards_BT, torch.tensor(values), mask_BT, torch.tensor(ended), gamma=gamma)


@pytest.mark.parametrize(
    ("values", "ended", "share"),
    [
        pytest.param([[0.0, 0.0], [1.0, 1.0]], [True, True], 1.0, id="it knows every outcome"),
        pytest.param([[0.5, 0.5], [0.5, 0.5]], [True, True], 0.0, id="a constant"),
        pytest.param([[1.0, 1.0], [0.0, 0.0]], [True, True], -3.0, id="worse than a constant"),
        pytest.param([[0.0, 0.0], [1.0, 1.0]], [False, False], 0.0, id="no outcome is known"),
        pytest.param([[0.0, 0.0], [1.0, 1.0]], [True, False], 0.0, id="known outcomes do not vary"),
    ],
)
def test_a_critic_explains_outcomes_that_are_known(values: list[list[float]], ended: list[bool], share: float) -> None:
    assert explained(values, ended) == pytest.approx(share)


def test_the_outcome_of_a_token_is_discounted() -> None:
    assert explained([[0.0, 0.0], [0.5, 1.0]], [True, True], gamma=0.5) == 1.0


CUT_BY_LENGTH = "queue.segments={max_tokens=2}"


def cut_batch(updater: Updater, *, known: bool) -> PaddedBatch:
    """Two segments that are cut, and two completions of a token whose rewards the updater's critic knows, or not."""
    first, second, _ = segments(2, 5)
    ended = [trajectory([5], number=1), trajectory([7], prompt=[9, 8], number=2)]
    batch = packed(first, second, *ended)
    with torch.no_grad():
        updater.policy.value_head.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        last_BT = torch.zeros_like(batch.rewards_BT)
        last_BT[2:, 0] = 1.0
        rewards_BT = updater.policy(batch, "both").values_BT * last_BT * (1.0 if known else -1.0)
    return batch._replace(rewards_BT=rewards_BT, reward_B=rewards_BT.sum(-1))


def update(folder: Path, *overrides: str, known: bool) -> tuple[dict[str, float], list[bool]]:
    """The metrics of an update on `cut_batch`, and if it moved the policy and its critic."""
    updater = case.updater(case.config_of("algorithm.entropy=0.1", *overrides), folder)
    batch, critic = cut_batch(updater, known=known), {id(one) for one in updater.policy.critic_parameters()}
    before = {id(one): one.detach().clone() for one in updater.policy.parameters()}
    metrics = case.metrics(updater, batch)
    moved = {key: not torch.equal(before[key], one) for one in updater.policy.parameters() for key in [id(one)]}
    return metrics, [any(value for key, value in moved.items() if (key in critic) == own) for own in (False, True)]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("steps", ["learner.minibatches=1", "learner.minibatches=2"])
@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
@pytest.mark.parametrize("critic", ["head", "policy"])
def test_the_policy_waits_for_a_critic_that_knows_no_outcomes_where_a_length_cuts(
    folder: Path, critic: str, advantage: str, steps: str
) -> None:
    """No advantage of a segment that was cut, no entropy bonus and no weight decay moves it meanwhile."""
    shared = CUT_BY_LENGTH, f"algorithm.advantage.kind={advantage}", f"algorithm.critic.model={critic}", steps
    told, moved = update(folder, *shared, known=False)
    assert told["outcomes_explained"] < 0.1
    assert moved == [False, True]


@pytest.mark.usefixtures("alone")
def test_while_the_policy_waits_nothing_that_follows_it_is_steered(folder: Path) -> None:
    steered = "algorithm.kl={reward_beta=0.1, target=6.0, horizon=100}", "algorithm.entropy_control.target=9.0"
    updater = case.updater(case.config_of("algorithm.entropy=0.1", CUT_BY_LENGTH, *steered), folder)
    updated = updater.update(cut_batch(updater, known=False))
    case.adapt(updater, updated)
    assert updated.frozen and (updater.beta, updater.bonus) == (0.1, (0.1, 0.1))


@pytest.mark.usefixtures("alone")
def test_the_policy_goes_on_once_the_critic_knows(folder: Path) -> None:
    told, moved = update(folder, CUT_BY_LENGTH, known=True)
    assert told["outcomes_explained"] > 0.1
    assert moved == [True, True]


@pytest.mark.usefixtures("alone")
def test_a_policy_that_is_to_wait_for_nothing_goes_on(folder: Path) -> None:
    told, moved = update(folder, "queue.segments={max_tokens=2, explained=0}", known=False)
    assert told["outcomes_explained"] < 0
    assert moved == [True, True]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("choice", ["queue.segments={}", "queue.max_lag=2"])
def test_cuts_by_age_wait_for_nobody(folder: Path, choice: str) -> None:
    told, moved = update(folder, choice, known=False)
    assert "outcomes_explained" not in told
    assert moved == [True, True]


@pytest.mark.usefixtures("alone")
def test_a_batch_of_whole_completions_waits_for_nobody(folder: Path) -> None:
    updater = case.updater(case.config_of(CUT_BY_LENGTH), folder)
    assert "outcomes_explained" not in case.metrics(updater, pad(case.batch()))
