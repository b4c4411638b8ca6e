"""A user's correction is one like ours, and is tried before a run depends on it."""

from collections.abc import Callable

import pytest
import torch
from conftest import REPOSITORY
from torch import Tensor

from streamppo.algorithms.corrections import importance_weights
from streamppo.algorithms.custom_functions import CorrectionInputs, custom_correction, try_custom_correction
from streamppo.config.sections import Config
from streamppo.errors import TaskError
from streamppo.learner.objective import objective

EXAMPLE = REPOSITORY / "examples" / "custom_correction.py"


def truncated(inputs: CorrectionInputs) -> Tensor:
    return inputs.ratio_BT.clamp(max=1.2)


def columns() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    behavior_BT = -torch.rand(4, 6, generator=generator, dtype=torch.float64) - 0.1
    proximal_BT = (behavior_BT + 0.5 * torch.randn(4, 6, generator=generator, dtype=torch.float64)).clamp(max=0.0)
    lag_BT = torch.randint(0, 4, (4, 6), generator=generator)
    mask_BT = torch.rand(4, 6, generator=generator) > 0.3
    hidden = [column.masked_fill(~mask_BT, torch.nan) for column in (proximal_BT, behavior_BT)]
    return hidden[0].requires_grad_(), hidden[1], lag_BT, mask_BT, mask_BT & (lag_BT < 3)


def test_the_clamped_ratio_is_our_truncation() -> None:
    proximal_BT, behavior_BT, _, mask_BT, _ = columns()
    own = custom_correction(*columns(), function=truncated)
    ours = importance_weights(proximal_BT, behavior_BT, mask_BT, level="token", mode="truncate", cap=1.2)
    assert torch.equal(own.weights, ours.weights) and torch.equal(own.keep, ours.keep)
    assert not own.weights.requires_grad


def test_masked_tokens_have_no_weight_and_are_0_in_every_column() -> None:
    seen: list[CorrectionInputs] = []

    def careless(inputs: CorrectionInputs) -> Tensor:
        seen.append(inputs)
        return torch.where(inputs.mask_BT, 2.0, torch.nan)

    found = custom_correction(*columns(), function=careless)
    mask_BT = columns()[3]
    assert torch.equal(found.weights, 2.0 * mask_BT)
    for name, column_BT in seen[0]._asdict().items():
        assert name == "mask_BT" or column_BT[~mask_BT].eq(0).all(), name


def test_a_sampled_token_of_weight_0_counts_as_dropped() -> None:
    *_, lag_BT, mask_BT, trained_BT = columns()
    found = custom_correction(*columns(), function=lambda inputs: inputs.trained_BT.double())
    assert torch.equal(found.keep, trained_BT)
    assert torch.equal(found.dropped["function"], mask_BT & (lag_BT == 3))


def in_place(inputs: CorrectionInputs) -> Tensor:
    return inputs.ratio_BT.clamp_(max=1.2)


def by_width(inputs: CorrectionInputs) -> Tensor:
    return inputs.ratio_BT / inputs.ratio_BT.mean()


WRONG: dict[str, tuple[Callable[[CorrectionInputs], object], str]] = {
    "a number": (lambda inputs: 1.0, "returned a float, not a tensor"),
    "one weight for a row": (
        lambda inputs: inputs.ratio_BT.amax(-1),
        r"have shape \(4,\); they must be \[B, T\] = \(4, 6\)",
    ),
    "not finite": (lambda inputs: inputs.ratio_BT / 0.0, r"weights\[0, 0\] = inf is not finite"),
    "below 0": (lambda inputs: inputs.log_ratio_BT, "below 0: it would reverse the gradient"),
    "all 0": (lambda inputs: 0.0 * inputs.ratio_BT, "every weight is 0: the policy would never move"),
    "another width, other weights": (by_width, "change with padding, or from call to call"),
    "chance": (lambda inputs: torch.rand(inputs.mask_BT.shape), "change with padding, or from call to call"),
    "in place": (in_place, "changes its input ratio_BT: work on a copy"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_correction_that_cannot_teach_is_refused_when_it_is_tried(wrong: str) -> None:
    function, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        try_custom_correction(function)


def test_a_correction_over_the_whole_batch_is_taken() -> None:
    try_custom_correction(lambda inputs: inputs.ratio_BT * inputs.mask_BT.sum() / inputs.ratio_BT.sum())


def test_a_run_chooses_it_by_name_and_refuses_a_wrong_one_by_name(math_config: Callable[..., Config]) -> None:
    def configured(function: str) -> Config:
        return math_config("algorithm.correction.kind=function", f"algorithm.correction.function={function}")

    proximal_BT, behavior_BT, lag_BT, mask_BT, trained_BT = columns()
    rest = torch.zeros_like(proximal_BT), lag_BT, mask_BT, trained_BT
    found = objective.build(configured(f"{EXAMPLE}:weights")).correct(proximal_BT, behavior_BT, *rest)
    for b, t in mask_BT.nonzero().tolist():
        ratio = (proximal_BT[b, t] - behavior_BT[b, t]).exp().item()
        assert found.weights[b, t].item() == pytest.approx(min(ratio, 2.0) * 0.9 ** int(lag_BT[b, t]), rel=1e-6)
    without_critic = math_config(
        "algorithm.advantage.kind=rloo", f"algorithm.correction={{kind='function', function='{EXAMPLE}:weights'}}"
    )
    assert objective.build(without_critic).anchor is None, "it is given the whole batch, and not a micro-batch"
    with pytest.raises(TaskError, match=r"correction\.function 'no\.module:weights'"):
        objective.build(configured("no.module:weights"))
    with pytest.raises(TaskError, match="is not a function"):
        objective.build(configured(f"{EXAMPLE}:CAP"))
    with pytest.raises(TaskError, match=r"math:sqrt': TypeError"):
        objective.build(configured("math:sqrt"))
