"""A user's correction function: its inputs, its call, and a trial call before the first update.

B trajectories of a batch, T completion tokens (padded).
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from streamppo.algorithms.checks import check_finite, refuse
from streamppo.algorithms.corrections import Correction, log_weights
from streamppo.algorithms.masked import check_tokens, fill
from streamppo.algorithms.purity import check_repeatable, leaving_inputs
from streamppo.algorithms.ratios import bounded_exp

TRIED_BT = (4, 6)
"""Trajectories and tokens of the trial batch."""


class CorrectionInputs(NamedTuple):
    """The columns of a whole batch, [B, T] each, all constants.

    `mask_BT` is True for tokens that the policy sampled, `trained_BT` for those of them that enter the loss. `lag_BT`
    is the age of a token in versions. At masked tokens all other columns are 0.

        ratio = exp(log_ratio) = exp(proximal_logprobs - behavior_logprobs)
    """

    proximal_logprobs_BT: Tensor
    behavior_logprobs_BT: Tensor
    log_ratio_BT: Tensor
    ratio_BT: Tensor
    lag_BT: Tensor
    mask_BT: Tensor
    trained_BT: Tensor


CustomCorrection: TypeAlias = Callable[[CorrectionInputs], object]
"""inputs -> one weight for each token, a [B, T] tensor. It is a user's code, so its result is checked."""


def custom_correction(
    proximal_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    lag_BT: Tensor,
    mask_BT: Tensor,
    trained_BT: Tensor,
    *,
    function: CustomCorrection,
) -> Correction:
    """The weights returned by `function`, detached; masked tokens get 0 whatever it returns for them.

    With `function = ratio_BT.clamp(max=cap)` this is truncation (`corrections.importance_weights`). A sampled token of
    weight 0 counts as dropped. Raises `ValueError` for a result that is not a [B, T] tensor of finite weights >= 0, and
    for a function that changes its inputs, which belong to the learner.
    """
    check_tokens(mask_BT, lag_BT=lag_BT, trained_BT=trained_BT)
    log_ratio_BT = log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="token")
    inputs = CorrectionInputs(
        proximal_logprobs_BT=fill(proximal_logprobs_BT.detach(), mask_BT),
        behavior_logprobs_BT=fill(behavior_logprobs_BT.detach(), mask_BT),
        log_ratio_BT=log_ratio_BT,
        ratio_BT=bounded_exp(log_ratio_BT).masked_fill(~mask_BT, 0.0),
        lag_BT=lag_BT.masked_fill(~mask_BT, 0),
        mask_BT=mask_BT,
        trained_BT=trained_BT,
    )
    found_BT = leaving_inputs(function, "correction")(inputs)
    if not isinstance(found_BT, Tensor):
        raise ValueError(f"the correction returned a {type(found_BT).__name__}, not a tensor")
    if found_BT.shape != mask_BT.shape:
        raise ValueError(
            f"the weights have shape {tuple(found_BT.shape)}; they must be [B, T] = {tuple(mask_BT.shape)}"
        )
    check_finite(mask_BT, weights=found_BT)
    refuse("weights", found_BT, mask_BT & (found_BT < 0), "below 0: it would reverse the gradient")
    weights_BT = fill(found_BT.detach(), mask_BT).to(log_ratio_BT.dtype)
    keep_BT = mask_BT & (weights_BT > 0)
    return Correction(weights_BT, keep_BT, {"function": mask_BT & ~keep_BT})


def try_custom_correction(function: CustomCorrection) -> None:
    """Call a correction function on a small trial batch, and again with more padding.

    Raises `ValueError` as `custom_correction` does, for weights that are all 0, and for weights that differ between the
    two calls.
    """
    generator = torch.Generator().manual_seed(0)
    behavior_BT = -torch.rand(TRIED_BT, generator=generator) - 0.1
    proximal_BT = (behavior_BT + 0.3 * torch.randn(TRIED_BT, generator=generator)).clamp(max=0.0)
    lag_BT = torch.arange(TRIED_BT[0])[:, None].expand(TRIED_BT).contiguous()
    mask_BT = torch.ones(TRIED_BT, dtype=torch.bool)
    mask_BT[0, -2:] = mask_BT[1, 1] = False
    trained_BT = mask_BT & (lag_BT < TRIED_BT[0] - 1)
    columns = proximal_BT, behavior_BT, lag_BT, mask_BT, trained_BT
    weights_BT = custom_correction(*columns, function=function).weights
    if not weights_BT.count_nonzero():
        raise ValueError("every weight is 0: the policy would never move")
    wider = [torch.nn.functional.pad(column, (0, 2)) for column in columns]
    again_BT = custom_correction(*wider, function=function).weights[:, : TRIED_BT[1]]
    check_repeatable(weights_BT, again_BT, "the weights change with padding, or")
