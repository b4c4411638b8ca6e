"""A user's advantage is an estimator like ours, and is tried before a run depends on it."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from conftest import REPOSITORY
from torch import Tensor

from streamppo.algorithms import groups
from streamppo.algorithms.custom_functions import AdvantageInputs, custom_advantage, try_custom_advantage
from streamppo.config.sections import Config
from streamppo.errors import ConfigError, TaskError
from streamppo.learner.objective import objective

EXAMPLE = REPOSITORY / "examples" / "custom_advantage.py"
GROUPS = [4, 4, 4, 9, 9, 7]
SCORES = [1.0, 0.25, 0.0, 0.5, 0.5, 1.0]


def columns() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rewards on the last unmasked token, NaN at every masked one; groups, mask, lag and cut-off completions."""
    mask_BT = torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) > 0.4
    mask_BT[:, 2] = True
    rewards_BT = torch.zeros(6, 5, dtype=torch.float64).masked_fill(~mask_BT, torch.nan)
    rewards_BT[:, 2] = torch.tensor(SCORES, dtype=torch.float64)
    return rewards_BT, torch.tensor(GROUPS), mask_BT, torch.ones(6, 5, dtype=torch.long), torch.arange(6) == 3


def by_hand() -> list[float]:
    """The example's advantage in plain floats."""
    result: list[float] = []
    for number, (score, group) in enumerate(zip(SCORES, GROUPS, strict=True)):
        others = [s for n, (s, g) in enumerate(zip(SCORES, GROUPS, strict=True)) if g == group and n != number]
        result.append(score - max(others) if others else 0.0)
    return result


def test_rloo_of_ones_own_is_our_rloo() -> None:
    arguments = columns()
    found_BT = custom_advantage(*arguments, function=lambda inputs: groups.rloo(inputs.scores_B, inputs.group_ids_B))
    ours_B = groups.rloo(torch.tensor(SCORES, dtype=torch.float64), torch.tensor(GROUPS))
    assert torch.equal(found_BT, ours_B[:, None].expand(6, 5).masked_fill(~arguments[2], 0.0))


def test_an_advantage_for_each_token_is_taken_as_it_is_and_masked_tokens_get_none() -> None:
    arguments = columns()
    found_BT = custom_advantage(
        *arguments,
        function=lambda inputs: (inputs.rewards_BT + 2 * inputs.lag_BT).masked_fill(~inputs.mask_BT, torch.inf),
    )
    expected_BT = (torch.nan_to_num(arguments[0]) + 2).masked_fill(~arguments[2], 0.0)
    assert torch.equal(found_BT, expected_BT)


def test_it_sees_the_mask_and_which_completions_were_cut_off_and_is_a_constant() -> None:
    seen: list[AdvantageInputs] = []

    def function(inputs: AdvantageInputs) -> Tensor:
        seen.append(inputs)
        return inputs.scores_B.clone().requires_grad_()

    arguments = columns()
    assert not custom_advantage(*arguments, function=function).requires_grad
    assert seen[0].truncated_B.tolist() == [False, False, False, True, False, False]
    assert torch.equal(seen[0].mask_BT, arguments[2])
    assert seen[0].scores_B.tolist() == SCORES
    assert seen[0].rewards_BT[~arguments[2]].eq(0).all()


BASELINE = [0.0]


def moving_average(inputs: AdvantageInputs) -> Tensor:
    BASELINE[0] = 0.9 * BASELINE[0] + 0.1 * float(inputs.scores_B.mean())
    return inputs.scores_B - BASELINE[0]


def in_place(inputs: AdvantageInputs) -> Tensor:
    inputs.mask_BT[inputs.truncated_B] = False
    return inputs.scores_B - inputs.scores_B.mean()


WRONG: dict[str, tuple[Callable[[AdvantageInputs], object], str]] = {
    "a number": (lambda inputs: 1.0, "returned a float, not a tensor"),
    "another shape": (
        lambda inputs: inputs.rewards_BT[:, :2],
        r"has shape \(6, 2\); it must be \[B\] = \(6,\) or \[B, T\] = \(6, 5\)",
    ),
    "a group that scored the same": (
        lambda inputs: (inputs.scores_B - inputs.scores_B.mean()) / (inputs.scores_B == 1.0),
        r"advantage\[1, 0\] = -inf is not finite",
    ),
    "state": (moving_average, "the advantages change from call to call: a resume could not repeat an update"),
    "chance": (lambda inputs: torch.rand(len(inputs.scores_B)), "the advantages change from call to call"),
    "in place": (in_place, "the advantage changes its input mask_BT: work on a copy"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_advantage_that_would_end_a_run_later_is_refused_when_it_is_tried(wrong: str) -> None:
    function, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        try_custom_advantage(function)


def test_an_advantage_that_changes_the_learners_batch_later_is_refused() -> None:
    with pytest.raises(ValueError, match="the advantage changes its input mask_BT"):
        custom_advantage(*columns(), function=in_place)


def test_a_standard_deviation_without_a_floor_is_refused_for_the_group_of_equal_scores() -> None:
    def naive(inputs: AdvantageInputs) -> Tensor:
        scores_GN = inputs.scores_B.view(2, 3)
        return ((scores_GN - scores_GN.mean(-1, keepdim=True)) / scores_GN.std(-1, keepdim=True)).flatten()

    with pytest.raises(ValueError, match=r"advantage\[3, 0\] = nan is not finite"):
        try_custom_advantage(naive)


def test_the_example_is_what_it_says() -> None:
    spec = importlib.util.spec_from_file_location("custom_advantage_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = columns()
    found_BT = custom_advantage(*arguments, function=module.advantage)
    assert found_BT[:, 2].tolist() == pytest.approx(by_hand())


def configured(math_config: Callable[..., Config], function: str, *more: str) -> Config:
    kind = f"algorithm.advantage={{kind='function', function='{function}'}}"
    return math_config(kind, *more)


def test_a_run_chooses_it_by_name_and_refuses_a_wrong_one_by_name(math_config: Callable[..., Config]) -> None:
    objective.build(configured(math_config, f"{EXAMPLE}:advantage"))
    with pytest.raises(TaskError, match=r"advantage\.function 'no\.module:advantage'"):
        objective.build(configured(math_config, "no.module:advantage"))
    with pytest.raises(TaskError, match=r"advantage\.function 'math:sqrt': TypeError"):
        objective.build(configured(math_config, "math:sqrt"))


def test_it_says_itself_if_a_batch_must_have_whole_groups(math_config: Callable[..., Config]) -> None:
    name, single = f"{EXAMPLE}:advantage", "queue.samples_per_prompt=1"
    assert configured(math_config, name).algorithm.compares_samples == "advantage 'function'"
    with pytest.raises(ConfigError, match="compares the samples of a prompt"):
        configured(math_config, name, single)
    alone = "algorithm.advantage.compares_samples=false"
    assert configured(math_config, name, single, alone).algorithm.compares_samples is None
    with pytest.raises(ConfigError, match="needs an advantage that compares"):
        configured(math_config, name, alone, "algorithm.zero_variance=mask")
    assert configured(math_config, name, "algorithm.zero_variance=mask").algorithm.zero_variance == "mask"
