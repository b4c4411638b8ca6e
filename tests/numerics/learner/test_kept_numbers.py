"""The numbers of each token that an update keeps beside its batch."""

from pathlib import Path

import learner_case as case
import numpy as np
import pytest
import torch

from streamppo.learner.batch.padded import pad
from streamppo.types import TokenRecord, floats

pytestmark = pytest.mark.usefixtures("alone")

GROUPS = "algorithm.advantage.kind=rloo"
STEPS = "learner.epochs=2"


@pytest.mark.parametrize(
    ("choices", "has_logprobs"),
    [([], True), (["learner.minibatches=3", STEPS], True), (["algorithm.critic.model=policy"], False)],
    ids=["one step", "six steps", "a critic of its own"],
)
def test_it_is_what_policy_and_critic_say_of_each_token_before_the_first_step(
    folder: Path, choices: list[str], has_logprobs: bool
) -> None:
    updater = case.updater(case.config_of(*choices, "learner.micro_batch_tokens=40"), folder)
    padded = pad(case.batch())
    with torch.no_grad():
        before = updater.policy(padded, "both")
    learned = updater.token_record(updater.update(padded))
    found = {"values": before.values_BT, "proximal_logprobs": before.logprobs_BT}
    for name, column in found.items() if has_logprobs else [("values", before.values_BT)]:
        rows = [column[row, :length] for row, length in enumerate(padded.length_B.tolist())]
        np.testing.assert_allclose(floats(getattr(learned, name)), torch.cat(rows).numpy(), rtol=0, atol=1e-5)
    with torch.no_grad():
        after = updater.policy(padded, "both")
    assert (after.values_BT - before.values_BT).abs().max() > 1e-3


def test_the_advantages_are_those_of_the_loss(folder: Path) -> None:
    updater, batch = case.updater(case.config_of(STEPS), folder), pad(case.batch())
    updated = updater.update(batch)
    advantages = updated.targets.estimate.advantages
    rows = [advantages[row, :length] for row, length in enumerate(batch.length_B.tolist())]
    assert floats(updater.token_record(updated).advantages).tolist() == torch.cat(rows).tolist()
    assert torch.cat(rows).std() > 0.1


@pytest.mark.parametrize(
    ("choices", "known"),
    [
        ([GROUPS, STEPS], {"proximal_logprobs", "advantages"}),
        ([GROUPS, STEPS, "algorithm.proximal=behavior", "algorithm.correction.kind=off"], {"advantages"}),
        ([STEPS, "algorithm.critic.model=policy", "algorithm.proximal=loglinear"], {"values", "advantages"}),
        ([STEPS, "archive.numbers=false"], {"values"}),
    ],
)
def test_what_no_pass_has_found_or_nobody_wants_is_empty(folder: Path, choices: list[str], known: set[str]) -> None:
    updater = case.updater(case.config_of(*choices), folder)
    learned = updater.token_record(updater.update(pad(case.batch())))
    assert {name for name in TokenRecord.__struct_fields__ if getattr(learned, name)} == known
