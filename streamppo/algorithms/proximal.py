"""Proximal log-probs without a forward pass of their own.

The tensors may have either layout; everything here is elementwise.
"""

from torch import Tensor

from streamppo.algorithms.layout import fill


def single_step(behavior_logprobs: Tensor, logprobs: Tensor, lag: Tensor, mask: Tensor) -> Tensor:
    """Where an update is one step, nothing moves before it: the proximal policy is the current one, detached."""
    _check(mask, behavior_logprobs=behavior_logprobs, logprobs=logprobs, lag=lag)
    return fill(logprobs.detach(), mask)


def loglinear(behavior_logprobs: Tensor, logprobs: Tensor, lag: Tensor, mask: Tensor) -> Tensor:
    """The proximal policy lies between behavior and current, one version behind the latter: interpolate.

        proximal = behavior / (lag + 1) + current * lag / (lag + 1)        (log-probs, detached)

    A-3PO, https://arxiv.org/abs/2512.06547: the weight of behavior is 1 / d with d = lag + 1, the versions
    from the token's to the one being made. At lag 0 the behavior policy IS the proximal one; for large lag
    the result is the current policy and the ratio goes to 1.
    """
    _check(mask, behavior_logprobs=behavior_logprobs, logprobs=logprobs, lag=lag)
    behavior, current = fill(behavior_logprobs.detach(), mask), fill(logprobs.detach(), mask)
    weight = 1 / (fill(lag, mask).clamp(min=0).to(current.dtype) + 1)
    return weight * behavior + (1 - weight) * current


def _check(mask: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} but mask has {tuple(mask.shape)}")
