"""A user's policy loss: its inputs, its call, and a trial call before the first update.

B rows of a micro-batch, T completion tokens (padded).
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamppo.algorithms.masked import check_tokens, fill
from streamppo.algorithms.policy_losses import TokenLoss, token_log_ratio
from streamppo.algorithms.purity import check_repeatable, leaving_inputs
from streamppo.algorithms.ratios import bounded_exp

TRIED_BT = (3, 5)
"""Rows and tokens of the trial micro-batch."""


class LossInputs(NamedTuple):
    """The columns of a micro-batch, [B, T] each. Only `logprobs_BT` and `ratio_BT` are differentiable.

    `mask_BT` is True for tokens that are trained on; at all others `log_ratio_BT` and `advantages_BT` are 0.
    `behavior_logprobs_BT` are the engine's, of the policy that sampled the token.

        ratio = exp(log_ratio) = exp(logprobs - proximal_logprobs)

    The weight proximal / behavior of `algorithm.correction` multiplies the loss afterwards: a loss that itself corrects
    for the age of the data needs a correction that is "off".
    """

    logprobs_BT: Tensor
    proximal_logprobs_BT: Tensor
    behavior_logprobs_BT: Tensor
    log_ratio_BT: Tensor
    ratio_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor


CustomLoss: TypeAlias = Callable[[LossInputs], object]
"""inputs -> one loss for each token, a [B, T] tensor. It is a user's code, so its result is checked."""


def custom_loss(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    function: CustomLoss,
) -> TokenLoss:
    """The loss returned by `function`; masked tokens get 0 whatever it returns for them.

    With `function = -advantages_BT * ratio_BT` this is `policy_losses.importance_weighted`. Raises `ValueError` for a
    result that is not a [B, T] tensor.
    """
    check_tokens(mask_BT, behavior_logprobs_BT=behavior_logprobs_BT)
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    ratio_BT = bounded_exp(log_ratio_BT)
    constants = proximal_logprobs_BT.detach(), behavior_logprobs_BT.detach()
    inputs = LossInputs(logprobs_BT, *constants, log_ratio_BT, ratio_BT, advantages_BT, mask_BT)
    loss_BT = function(inputs)
    if not isinstance(loss_BT, Tensor):
        raise ValueError(f"the loss returned a {type(loss_BT).__name__}, not a tensor")
    if loss_BT.shape != mask_BT.shape:
        raise ValueError(f"the loss has shape {tuple(loss_BT.shape)}; it must be [B, T] = {tuple(mask_BT.shape)}")
    return TokenLoss(fill(loss_BT, mask_BT), torch.zeros_like(mask_BT), ratio_BT.detach())


def try_custom_loss(function: CustomLoss) -> None:
    """Call a loss function twice on a small trial micro-batch, forward and backward.

    Raises `ValueError` for another shape, for a loss or gradient that is not finite, and if no gradient reaches the
    log-probs: such a run would not train, or fail at its first update. Raises it also for losses that differ between
    the two calls, and for a function that changes its inputs, which belong to the learner.
    """
    generator = torch.Generator().manual_seed(0)
    proximal_BT = -torch.rand(TRIED_BT, generator=generator) - 0.1
    moved_BT = torch.randn(TRIED_BT, generator=generator)
    logprobs_BT = (proximal_BT + 0.1 * moved_BT).clamp(max=0.0).requires_grad_()
    behavior_BT = (proximal_BT - 0.1 * moved_BT.flip(-1)).clamp(max=0.0)
    advantages_BT = torch.randn(TRIED_BT, generator=generator)
    mask_BT = torch.ones(TRIED_BT, dtype=torch.bool)
    mask_BT[0, -2:] = False
    columns, watched = (logprobs_BT, proximal_BT, behavior_BT, advantages_BT, mask_BT), leaving_inputs(function, "loss")
    loss_BT, again_BT = (custom_loss(*columns, function=watched).loss for _ in range(2))
    if not loss_BT.isfinite().all():
        raise ValueError("the loss is not finite on log-probs between -1.5 and 0")
    check_repeatable(loss_BT, again_BT, "the losses change")
    gradient_BT = _gradient(loss_BT, logprobs_BT)
    if gradient_BT is None or not gradient_BT.count_nonzero():
        raise ValueError("no gradient reaches logprobs_BT: the policy would never move")
    if not gradient_BT.isfinite().all():
        raise ValueError("the gradient is not finite on log-probs between -1.5 and 0")


def _gradient(loss_BT: Tensor, logprobs_BT: Tensor) -> Tensor | None:
    if not loss_BT.requires_grad:
        return None
    return torch.autograd.grad(loss_BT.sum(), logprobs_BT, allow_unused=True)[0]
