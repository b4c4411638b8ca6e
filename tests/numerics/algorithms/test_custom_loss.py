"""A user's loss is one like ours, and is tried before a run depends on it."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from conftest import REPOSITORY
from torch import Tensor

from streamppo.algorithms.corrections import scale_negatives, topr
from streamppo.algorithms.custom_functions import LossInputs, custom_loss, try_custom_loss
from streamppo.algorithms.policy_losses import importance_weighted
from streamppo.config.sections import Config
from streamppo.errors import TaskError
from streamppo.learner.objective import objective

EXAMPLE = REPOSITORY / "examples" / "custom_loss.py"


def surrogate(inputs: LossInputs) -> Tensor:
    return -inputs.advantages_BT * inputs.ratio_BT


def columns() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    proximal_BT = -torch.rand(4, 6, generator=generator, dtype=torch.float64) - 0.1
    logprobs_BT = (proximal_BT + 0.2 * torch.randn(4, 6, generator=generator, dtype=torch.float64)).clamp(max=0.0)
    advantages_BT = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask_BT = torch.rand(4, 6, generator=generator) > 0.3
    behavior_BT = (proximal_BT + 0.3 * torch.randn(4, 6, generator=generator, dtype=torch.float64)).clamp(max=0.0)
    return logprobs_BT.requires_grad_(), proximal_BT, behavior_BT, advantages_BT, mask_BT


def test_the_plain_surrogate_is_our_importance_weighted_loss() -> None:
    logprobs_BT, proximal_BT, behavior_BT, *rest = columns()
    ours = importance_weighted(logprobs_BT, proximal_BT, *rest)
    own = custom_loss(logprobs_BT, proximal_BT, behavior_BT, *rest, function=surrogate)
    assert torch.equal(ours.loss, own.loss) and torch.equal(ours.ratio, own.ratio)
    (expected,) = torch.autograd.grad(ours.loss.sum(), logprobs_BT)
    (found,) = torch.autograd.grad(own.loss.sum(), logprobs_BT)
    assert torch.equal(expected, found)


def test_masked_tokens_stay_out_whatever_the_function_says_of_them() -> None:
    logprobs_BT, *constants, mask_BT = columns()

    def careless(inputs: LossInputs) -> Tensor:
        return torch.where(inputs.mask_BT, surrogate(inputs), torch.inf)

    loss_BT = custom_loss(logprobs_BT, *constants, mask_BT, function=careless).loss
    assert loss_BT[~mask_BT].eq(0).all() and loss_BT.isfinite().all()
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logprobs_BT)
    assert gradient_BT[~mask_BT].eq(0).all()


def test_a_loss_of_your_own_sees_the_policy_that_sampled() -> None:
    """TOPR written as a loss, with the correction off, is our correction on the plain surrogate."""
    logprobs_BT, proximal_BT, behavior_BT, advantages_BT, mask_BT = columns()

    def tapered(inputs: LossInputs) -> Tensor:
        log_ratio_BT = (inputs.proximal_logprobs_BT - inputs.behavior_logprobs_BT).masked_fill(~inputs.mask_BT, 0.0)
        weight_BT = log_ratio_BT.sum(-1, keepdim=True).exp().clamp(max=1.0)
        assert not inputs.behavior_logprobs_BT.requires_grad
        return surrogate(inputs) * torch.where(inputs.advantages_BT < 0, 0.25 * weight_BT, 1.0)

    own = custom_loss(logprobs_BT, proximal_BT, behavior_BT, advantages_BT, mask_BT, function=tapered).loss
    ours = importance_weighted(logprobs_BT, proximal_BT, advantages_BT, mask_BT).loss
    ours = (
        scale_negatives(ours, advantages_BT, negative=0.25)
        * topr(proximal_BT, behavior_BT, advantages_BT, mask_BT).weights
    )
    torch.testing.assert_close(own, ours, rtol=1e-12, atol=0)
    (expected,) = torch.autograd.grad(ours.sum(), logprobs_BT)
    (found,) = torch.autograd.grad(own.sum(), logprobs_BT)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def in_place(inputs: LossInputs) -> Tensor:
    inputs.mask_BT[:, 0] = False
    return surrogate(inputs)


WRONG: dict[str, tuple[Callable[[LossInputs], object], str]] = {
    "a number": (lambda inputs: 1.0, "returned a float, not a tensor"),
    "one loss for a row": (
        lambda inputs: surrogate(inputs).sum(-1),
        r"has shape \(3,\); it must be \[B, T\] = \(3, 5\)",
    ),
    "no gradient": (lambda inputs: surrogate(inputs).detach(), "no gradient reaches logprobs_BT"),
    "a gradient of zero": (lambda inputs: surrogate(inputs) * 0.0, "no gradient reaches logprobs_BT"),
    "not finite": (lambda inputs: surrogate(inputs) / 0.0, "the loss is not finite"),
    "a gradient that is not finite": (lambda inputs: (inputs.log_ratio_BT * 0.0).sqrt(), "gradient is not finite"),
    "chance": (lambda inputs: surrogate(inputs) * torch.rand(()), "the losses change from call to call"),
    "two arguments": (
        lambda logprobs, advantages: logprobs,
        r"takes \(logprobs, advantages\), but gets one .*`LossInputs`",
    ),
    "in place": (in_place, "the loss changes its input mask_BT: work on a copy"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_loss_that_cannot_teach_is_refused_when_it_is_tried(wrong: str) -> None:
    function, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        try_custom_loss(function)  # pyright: ignore[reportArgumentType]


def test_the_example_is_what_it_says() -> None:
    spec = importlib.util.spec_from_file_location("custom_loss_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    logprobs_BT, proximal_BT, behavior_BT, advantages_BT, mask_BT = columns()
    found = custom_loss(logprobs_BT, proximal_BT, behavior_BT, advantages_BT, mask_BT, function=module.loss).loss
    for b, t in mask_BT.nonzero().tolist():
        ratio, advantage = (logprobs_BT[b, t] - proximal_BT[b, t]).exp().item(), advantages_BT[b, t].item()
        expected = -advantage * ratio + 5.0 * max(0.0, abs(ratio - 1) - 0.2) ** 2
        assert found[b, t].item() == pytest.approx(expected, rel=1e-12)


def test_a_run_chooses_it_by_name_and_refuses_a_wrong_one_by_name(math_config: Callable[..., Config]) -> None:
    def configured(function: str) -> Config:
        return math_config("algorithm.policy_loss.kind=function", f"algorithm.policy_loss.function={function}")

    chosen = objective.build(configured(f"{EXAMPLE}:loss")).policy_loss
    logprobs_BT, *rest = columns()
    assert chosen(logprobs_BT, *rest).loss.requires_grad
    with pytest.raises(TaskError, match=r"policy_loss\.function 'no\.module:loss'"):
        objective.build(configured("no.module:loss"))
    with pytest.raises(TaskError, match="is not a function"):
        objective.build(configured(f"{EXAMPLE}:RANGE"))
    with pytest.raises(TaskError, match=r"math:sqrt': TypeError"):
        objective.build(configured("math:sqrt"))
