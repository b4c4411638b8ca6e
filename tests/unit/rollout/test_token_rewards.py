"""Rewards stand where they were given, from the reward to the learner's tensors."""

import msgspec
import numpy as np
import pytest
import torch
from conftest import trajectory

from streamppo.learner.batch.padded import pad
from streamppo.queue.rules.validation import defect
from streamppo.rollout.episode import place
from streamppo.types import Batch, Reward, floats

MASK = np.array([True, True, False, False, True, True])


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Reward(turns=(1.0, 2.0)), [0, 1, 0, 0, 0, 2]),
        (Reward(score=5.0, turns=(1.0, 2.0)), [0, 1, 0, 0, 0, 7]),
        (Reward(tokens=(1.0, 2.0, 3.0, 4.0)), [1, 2, 0, 0, 3, 4]),
        (Reward(score=1.0, tokens=(1.0, 2.0, 3.0, 4.0), turns=(10.0, 20.0)), [1, 12, 0, 0, 3, 25]),
    ],
)
def test_token_turn_and_final_rewards_stand_on_sampled_tokens_and_sum_to_the_total(
    reward: Reward, expected: list[float]
) -> None:
    placed = floats(place(reward, MASK, [1, 5]))
    assert placed.tolist() == expected
    assert placed.sum() == reward.total


def test_a_plain_score_needs_no_column() -> None:
    assert place(Reward(score=1.0), MASK, [1, 5]) == b""


def test_the_learner_trains_on_token_rewards_and_on_the_last_token_where_there_are_none() -> None:

    column = np.array([0.0, 1.0, 2.0], np.float32).tobytes()
    shaped = msgspec.structs.replace(trajectory([5, 6, 7], reward=3.0), token_rewards=column)
    plain = trajectory([5, 6, 7, 8], reward=2.0, mask=[True, True, True, False])
    named = msgspec.structs.replace(plain, components={"format": 0.5})
    packed = pad(Batch(version=0, min_version=0, trajectories=(shaped, named)))
    assert packed.rewards_BT.tolist() == [[0, 1, 2, 0], [0, 0, 2, 0]]
    assert torch.equal(packed.rewards_BT.sum(-1), packed.reward_B)
    assert packed.components_B.keys() == {"format"}
    assert packed.components_B["format"].isnan().tolist() == [True, False]
    assert packed.components_B["format"][1] == 0.5


def test_the_queue_refuses_token_rewards_of_another_length_or_not_finite() -> None:

    good = trajectory([5, 6])
    for column, reason in (
        (b"\0" * 4, "token rewards of 4 bytes"),
        (np.float32([0, np.nan]).tobytes(), "the reward is"),
    ):
        assert reason in (defect(msgspec.structs.replace(good, token_rewards=column), None) or "")
