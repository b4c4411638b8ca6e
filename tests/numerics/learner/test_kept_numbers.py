"""What an update leaves behind about each token, for people who look at its batch later."""

from pathlib import Path

import learner_case as case
import pytest
import torch

from streamppo.learner.batch import pad
from streamppo.types import Learned, floats

pytestmark = pytest.mark.usefixtures("alone")

GROUPS = "algorithm.advantage.kind=rloo"
STEPS = "learner.epochs=2"


def kept(folder: Path, *overrides: str) -> tuple[Learned, dict[str, list[float]]]:
    """The numbers that one update keeps, and those that it was made of."""
    updater, batch = case.updater(case.config_of(*overrides), folder), pad(case.batch())
    updated = updater.update(batch)
    targets = updated.targets
    columns = {
        "values": targets.scored.values_BT,
        "proximal_logprobs": targets.scored.logprobs_BT,
        "advantages": targets.estimate.advantages,
    }
    rows = [(row, int(length)) for row, length in enumerate(batch.length_B)]
    made_of = {name: torch.cat([column[row, :n] for row, n in rows]).tolist() for name, column in columns.items()}
    return updater.learned(updated), made_of


def test_every_token_has_the_numbers_that_the_loss_was_made_of(folder: Path) -> None:
    learned, made_of = kept(folder, STEPS)
    for name, numbers in made_of.items():
        assert floats(getattr(learned, name)).tolist() == numbers
        assert any(numbers)
    assert made_of["advantages"] != made_of["values"]


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
    learned, _ = kept(folder, *choices)
    assert {name for name in Learned.__struct_fields__ if getattr(learned, name)} == known
