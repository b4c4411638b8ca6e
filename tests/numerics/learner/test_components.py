"""Components of a reward reach the update: GDPO compares each by itself, and the metrics have their means."""

from pathlib import Path

import learner_case as case
import msgspec
import pytest
import torch

from streamppo.algorithms import groups
from streamppo.errors import ConfigError, UpdateError
from streamppo.learner.batch.padded import PaddedBatch, pad

pytestmark = pytest.mark.usefixtures("alone")
GDPO = "algorithm.advantage={kind='gdpo', weights={right=1.0, form=0.5}}"


def batch(*, lacking: int | None = None) -> PaddedBatch:
    """Rewards of two components; the trajectory numbered `lacking` has only one of them."""
    plain = case.batch()
    made = [
        msgspec.structs.replace(
            one, components={"right": float(n % 3 == 0)} | ({} if n == lacking else {"form": float(n % 2) * 7})
        )
        for n, one in enumerate(plain.trajectories)
    ]
    return pad(msgspec.structs.replace(plain, trajectories=tuple(made)))


def test_every_token_carries_the_advantage_of_its_trajectory_whatever_the_micro_batches(folder: Path) -> None:
    padded, made = batch(), []
    for budget in (100000, 40):
        updater = case.updater(case.config_of(GDPO, f"learner.micro_batch_tokens={budget}"), folder)
        updated = updater.update(padded)
        known_B = groups.gdpo(padded.components_B, padded.prompt_B, weights={"right": 1.0, "form": 0.5})
        expected_BT = known_B[:, None].expand(padded.mask_BT.shape).masked_fill(~padded.mask_BT, 0.0)
        assert torch.equal(updated.targets.estimate.advantages, expected_BT)
        metrics = case.adapt(updater, updated)
        assert (metrics["reward_right"], metrics["reward_form"]) == (pytest.approx(1 / 3), 3.5)
        made.append(case.whole(updater.policy))
    for name, tensor in made[0].items():
        torch.testing.assert_close(tensor, made[1][name], rtol=0, atol=2e-6)


def test_a_mean_is_over_the_trajectories_that_have_the_component(folder: Path) -> None:
    updater = case.updater(case.config_of("algorithm.advantage.kind=grpo"), folder)
    assert case.metrics(updater, batch(lacking=1))["reward_form"] == pytest.approx(5 * 7 / 11)


def test_a_trajectory_without_a_component_is_refused_by_name(folder: Path) -> None:
    updater = case.updater(case.config_of(GDPO), folder)
    with pytest.raises(UpdateError, match="trajectory 5 lacks the component 'form'"):
        updater.update(batch(lacking=5))


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("algorithm.zero_variance=mask", "compares scores, and with gdpo"),
        ("algorithm.kl.reward_beta=0.1", "ignores kl.reward_beta"),
        ("algorithm.advantage.weights={right=0.0}", "weights must name a component"),
    ],
)
def test_choices_that_gdpo_has_no_use_for_are_refused(choice: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        case.config_of(GDPO, choice)
