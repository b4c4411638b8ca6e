"""RMS norms as one operation with its own gradient. N tokens of width C.

    y = w * n,   n = x * inv,   inv = 1 / sqrt(mean(x * x) + eps)        https://arxiv.org/abs/1910.07467, equation 4
    dx = inv * (w * dy - n * mean(n * w * dy)),   dw = sum over tokens of n * dy

On a CPU, forward and backward, this operation takes half to two thirds of the time of transformers' norm
(benchmarks/cost/short_rows.py). On a GPU torch's kernel is used: in 16 bits it rounds once, as engines do.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamppo.config.rollout import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMES = tuple(f"{family.capitalize()}RMSNorm" for family in FAMILIES)
"""transformers' classes with exactly this norm; norms of other families differ, for example in a weight 1 + w."""


def prepare(transformer: "PreTrainedModel") -> None:
    """Replace the norms of `transformer` by this operation; norms of other families stay unchanged."""
    for module in transformer.modules():
        if type(module).__name__ in NAMES:
            module.forward = partial(normalise, module, module.forward)


def normalise(module: Any, otherwise: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    """Apply the norm of llama, qwen2 and qwen3; on a CPU only in float32, else call `otherwise`, the original."""
    if hidden_states.is_cuda:
        return torch.nn.functional.rms_norm(hidden_states, module.weight.shape, module.weight, module.variance_epsilon)
    if hidden_states.dtype is not torch.float32 or module.weight.dtype is not torch.float32:
        return otherwise(hidden_states)
    normed: Any = _RMSNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        mean_N1 = torch.linalg.vecdot(x_NC, x_NC)[..., None] / x_NC.shape[-1]
        inverse_N1 = mean_N1.add_(eps).rsqrt_()
        normed_NC = x_NC * inverse_N1
        ctx.save_for_backward(normed_NC, inverse_N1, weight_C)
        return normed_NC * weight_C

    @staticmethod
    def backward(ctx: Any, gradient_NC: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        normed_NC, inverse_N1, weight_C = ctx.saved_tensors
        product_NC = gradient_NC * normed_NC
        mean_N1 = (product_NC @ weight_C)[..., None] / len(weight_C)
        grad_x_NC = (gradient_NC * weight_C).addcmul_(normed_NC, mean_N1, value=-1).mul_(inverse_N1)
        return grad_x_NC, product_NC.flatten(0, -2).sum(0), None
