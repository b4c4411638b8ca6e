"""A user's advantage, correction and policy loss: for each, the type of its inputs, a checked call, and a trial.

    function            inputs                        B
    `advantage`         `AdvantageInputs`             trajectories of a whole batch, the same on every rank
    `correction`        `CorrectionInputs`            trajectories of a batch
    `loss`              `LossInputs`                  rows of a micro-batch

T completion tokens (padded). A function must leave its inputs unchanged, because they are the learner's tensors. Equal
inputs must give equal results, because a resume or a replay repeats updates. The trial is made before the first update.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from streamppo.algorithms import masked
from streamppo.algorithms.corrections import Correction, log_weights
from streamppo.algorithms.policy_losses import TokenLoss, token_log_ratio

Inputs = TypeVar("Inputs", bound=tuple[Tensor, ...])


def check_takes(function: Callable[[Inputs], object], inputs: type[Inputs]) -> None:
    """Raise `ValueError` if a function cannot be called with one argument, a NamedTuple of the type `inputs`."""
    signature = inspect.signature(function)
    try:
        signature.bind(None)
    except TypeError as error:
        fields = ", ".join(inputs.__annotations__)
        raise ValueError(f"it takes {signature}, but gets one argument: `{inputs.__name__}` with {fields}") from error


def check_inputs_unchanged(function: Callable[[Inputs], object], name: str) -> Callable[[Inputs], object]:
    """Wrap a function of a NamedTuple of tensors so that it raises `ValueError` if it changes one of them."""

    def checked(inputs: Inputs) -> object:
        before = [column.detach().clone() for column in inputs]
        result = function(inputs)
        for field, old, new in zip(type(inputs).__annotations__, before, inputs, strict=True):
            if not torch.equal(old, new):
                raise ValueError(f"the {name} changes its input {field}: work on a copy")
        return result

    return checked


def check_repeatable(first: Tensor, second: Tensor, fault: str) -> None:
    """Raise `ValueError` if two results for the same inputs differ; `fault` begins the message."""
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-6):
        raise ValueError(f"{fault} from call to call: a resume could not repeat an update")


def _tensor(result: object, name: str) -> Tensor:
    if not isinstance(result, Tensor):
        raise ValueError(f"the {name} returned a {type(result).__name__}, not a tensor")
    return result


# --- advantage -----------------------------------------------------------------------------------------------------

TRIAL_SCORES = ((1.0, 0.0, 0.5), (0.0, 0.0, 0.0))
"""Scores of the trial batch, group by group; in the second group all scores are equal."""
TRIAL_TOKENS = 5


class AdvantageInputs(NamedTuple):
    """A batch, in tensors [B] and [B, T], with all samples of a prompt if the advantage compares samples.

    `mask_BT` is True for tokens that the policy sampled. `rewards_BT` is 0 at all other tokens; a KL penalty in the
    reward is already subtracted. `scores_B` sums each trajectory's rewards. Trajectories of one prompt have the same
    number in `group_ids_B`. `lag_BT` is a token's lag in versions. `truncated_B` is True for truncated completions.
    """

    rewards_BT: Tensor
    scores_B: Tensor
    group_ids_B: Tensor
    mask_BT: Tensor
    lag_BT: Tensor
    truncated_B: Tensor


CustomAdvantage: TypeAlias = Callable[[AdvantageInputs], object]
"""Returns the advantages: one per trajectory, [B], or one per token, [B, T]; the result is checked."""


def custom_advantage(
    rewards_BT: Tensor,
    group_ids_B: Tensor,
    mask_BT: Tensor,
    lag_BT: Tensor,
    truncated_B: Tensor,
    *,
    function: CustomAdvantage,
) -> Tensor:
    """[B, T], the advantages that `function` returns, detached, and set to 0 at masked tokens.

    With `function = groups.rloo(scores_B, group_ids_B)` this is RLOO. Raises `ValueError` for a result that is not a
    tensor of [B] or [B, T], for advantages that are not finite, and for a function that changes its inputs.
    """
    rewards_BT = masked.fill(rewards_BT, mask_BT)
    scores_B = masked.sequence_sum(rewards_BT, mask_BT)
    inputs = AdvantageInputs(rewards_BT, scores_B, group_ids_B, mask_BT, lag_BT, truncated_B)
    advantage = _tensor(check_inputs_unchanged(function, "advantage")(inputs), "advantage")
    if advantage.shape not in (mask_BT.shape, scores_B.shape):
        shapes = f"[B] = {tuple(scores_B.shape)} or [B, T] = {tuple(mask_BT.shape)}"
        raise ValueError(f"the advantage has shape {tuple(advantage.shape)}; it must be {shapes}")
    advantage_BT = masked.spread(advantage, mask_BT) if advantage.dim() == 1 else advantage
    masked.check_finite(mask_BT, advantage=advantage_BT)
    return masked.fill(advantage_BT, mask_BT).detach()


def try_custom_advantage(function: CustomAdvantage) -> None:
    """Call an advantage function twice on a small trial batch, in which one group has equal scores.

    Raises `ValueError` as `custom_advantage` does, for a wrong signature, and for advantages that differ between the
    two calls.
    """
    check_takes(function, AdvantageInputs)
    scores_B = torch.tensor(TRIAL_SCORES).flatten()
    group_ids_B = torch.arange(len(TRIAL_SCORES)).repeat_interleave(len(TRIAL_SCORES[0]))
    mask_BT = torch.ones(len(scores_B), TRIAL_TOKENS, dtype=torch.bool)
    mask_BT[0, -2:] = False
    mask_BT[1, 1] = False
    truncated_B = torch.arange(len(scores_B)) == 2
    columns = masked.on_last_token(scores_B, mask_BT), group_ids_B, mask_BT, mask_BT.long(), truncated_B
    first_BT, again_BT = (custom_advantage(*columns, function=function) for _ in range(2))
    check_repeatable(first_BT, again_BT, "the advantages change")


# --- correction ----------------------------------------------------------------------------------------------------

TRIAL_BATCH = (4, 6)


class CorrectionInputs(NamedTuple):
    """The columns of a whole batch, [B, T] each, without gradients.

    `mask_BT` is True for tokens that the policy sampled. `trained_BT` is True for sampled tokens that enter the loss.
    `lag_BT` is a token's lag in versions. At masked tokens all other columns are 0.

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
"""Returns one weight per token, [B, T]; the result is checked."""


def custom_correction(
    proximal_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    lag_BT: Tensor,
    mask_BT: Tensor,
    trained_BT: Tensor,
    *,
    function: CustomCorrection,
) -> Correction:
    """The weights that `function` returns, detached, and set to 0 at masked tokens.

    With `function = ratio_BT.clamp(max=cap)` this is truncation (`corrections.importance_weights`). A sampled token of
    weight 0 counts as dropped. Raises `ValueError` for a result that is not a [B, T] tensor of finite weights >= 0, and
    for a function that changes its inputs.
    """
    masked.check_tokens(mask_BT, lag_BT=lag_BT, trained_BT=trained_BT)
    log_ratio_BT = log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="token")
    inputs = CorrectionInputs(
        proximal_logprobs_BT=masked.fill(proximal_logprobs_BT.detach(), mask_BT),
        behavior_logprobs_BT=masked.fill(behavior_logprobs_BT.detach(), mask_BT),
        log_ratio_BT=log_ratio_BT,
        ratio_BT=masked.bounded_exp(log_ratio_BT).masked_fill(~mask_BT, 0.0),
        lag_BT=lag_BT.masked_fill(~mask_BT, 0),
        mask_BT=mask_BT,
        trained_BT=trained_BT,
    )
    result_BT = _tensor(check_inputs_unchanged(function, "correction")(inputs), "correction")
    if result_BT.shape != mask_BT.shape:
        raise ValueError(
            f"the weights have shape {tuple(result_BT.shape)}; they must be [B, T] = {tuple(mask_BT.shape)}"
        )
    masked.check_finite(mask_BT, weights=result_BT)
    masked.refuse("weights", result_BT, mask_BT & (result_BT < 0), "below 0: it would reverse the gradient")
    weights_BT = masked.fill(result_BT.detach(), mask_BT).to(log_ratio_BT.dtype)
    keep_BT = mask_BT & (weights_BT > 0)
    return Correction(weights_BT, keep_BT, {"function": mask_BT & ~keep_BT})


def try_custom_correction(function: CustomCorrection) -> None:
    """Call a correction function on a small trial batch, and again with more padding.

    Raises `ValueError` as `custom_correction` does, for a wrong signature, for weights that are all 0, and for weights
    that differ between the two calls.
    """
    check_takes(function, CorrectionInputs)
    generator = torch.Generator().manual_seed(0)
    behavior_BT = -torch.rand(TRIAL_BATCH, generator=generator) - 0.1
    proximal_BT = (behavior_BT + 0.3 * torch.randn(TRIAL_BATCH, generator=generator)).clamp(max=0.0)
    lag_BT = torch.arange(TRIAL_BATCH[0])[:, None].expand(TRIAL_BATCH).contiguous()
    mask_BT = torch.ones(TRIAL_BATCH, dtype=torch.bool)
    mask_BT[0, -2:] = mask_BT[1, 1] = False
    trained_BT = mask_BT & (lag_BT < TRIAL_BATCH[0] - 1)
    columns = proximal_BT, behavior_BT, lag_BT, mask_BT, trained_BT
    weights_BT = custom_correction(*columns, function=function).weights
    if not weights_BT.count_nonzero():
        raise ValueError("every weight is 0: the policy would never move")
    wider = [torch.nn.functional.pad(column, (0, 2)) for column in columns]
    again_BT = custom_correction(*wider, function=function).weights[:, : TRIAL_BATCH[1]]
    check_repeatable(weights_BT, again_BT, "the weights change with padding, or")


# --- loss ----------------------------------------------------------------------------------------------------------

TRIAL_MICRO_BATCH = (3, 5)


class LossInputs(NamedTuple):
    """The columns of a micro-batch, [B, T] each. Only `logprobs_BT` and `ratio_BT` are differentiable.

    `mask_BT` is True for tokens that are trained on; `log_ratio_BT` and `advantages_BT` are 0 at all other tokens.
    `behavior_logprobs_BT` are from the engine: the log-probs of the policy that sampled the token.

        ratio = exp(log_ratio) = exp(logprobs - proximal_logprobs)

    The learner multiplies the returned loss by the weights of `algorithm.correction`. A loss that itself corrects for
    lag needs the correction "off".
    """

    logprobs_BT: Tensor
    proximal_logprobs_BT: Tensor
    behavior_logprobs_BT: Tensor
    log_ratio_BT: Tensor
    ratio_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor


CustomLoss: TypeAlias = Callable[[LossInputs], object]
"""Returns one loss per token, [B, T]; the result is checked."""


def custom_loss(
    logprobs_BT: Tensor,
    proximal_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    function: CustomLoss,
) -> TokenLoss:
    """The loss that `function` returns, set to 0 at masked tokens.

    With `function = -advantages_BT * ratio_BT` this is `policy_losses.importance_weighted`. Raises `ValueError` for a
    result that is not a [B, T] tensor.
    """
    masked.check_tokens(mask_BT, behavior_logprobs_BT=behavior_logprobs_BT)
    log_ratio_BT, advantages_BT = token_log_ratio(logprobs_BT, proximal_logprobs_BT, advantages_BT, mask_BT)
    ratio_BT = masked.bounded_exp(log_ratio_BT)
    constants = proximal_logprobs_BT.detach(), behavior_logprobs_BT.detach()
    inputs = LossInputs(logprobs_BT, *constants, log_ratio_BT, ratio_BT, advantages_BT, mask_BT)
    loss_BT = _tensor(function(inputs), "loss")
    if loss_BT.shape != mask_BT.shape:
        raise ValueError(f"the loss has shape {tuple(loss_BT.shape)}; it must be [B, T] = {tuple(mask_BT.shape)}")
    return TokenLoss(masked.fill(loss_BT, mask_BT), torch.zeros_like(mask_BT), ratio_BT.detach())


def try_custom_loss(function: CustomLoss) -> None:
    """Call a loss function twice on a small trial micro-batch, forward and backward.

    Raises `ValueError` for a wrong signature or shape, a loss or gradient that is not finite, no gradient, losses that
    differ between the calls, and a function that changes its inputs.
    """
    check_takes(function, LossInputs)
    generator = torch.Generator().manual_seed(0)
    proximal_BT = -torch.rand(TRIAL_MICRO_BATCH, generator=generator) - 0.1
    moved_BT = torch.randn(TRIAL_MICRO_BATCH, generator=generator)
    logprobs_BT = (proximal_BT + 0.1 * moved_BT).clamp(max=0.0).requires_grad_()
    behavior_BT = (proximal_BT - 0.1 * moved_BT.flip(-1)).clamp(max=0.0)
    advantages_BT = torch.randn(TRIAL_MICRO_BATCH, generator=generator)
    mask_BT = torch.ones(TRIAL_MICRO_BATCH, dtype=torch.bool)
    mask_BT[0, -2:] = False
    columns = logprobs_BT, proximal_BT, behavior_BT, advantages_BT, mask_BT
    checked = check_inputs_unchanged(function, "loss")
    loss_BT, again_BT = (custom_loss(*columns, function=checked).loss for _ in range(2))
    if not loss_BT.isfinite().all():
        raise ValueError("the loss is not finite on log-probs between -1.5 and 0")
    check_repeatable(loss_BT, again_BT, "the losses change")
    gradient_BT = None
    if loss_BT.requires_grad:
        (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logprobs_BT, allow_unused=True)
    if gradient_BT is None or not gradient_BT.count_nonzero():
        raise ValueError("no gradient reaches logprobs_BT: the policy would never move")
    if not gradient_BT.isfinite().all():
        raise ValueError("the gradient is not finite on log-probs between -1.5 and 0")
