"""Attention over short rows on a CPU: rotary positions and attention as one operation with its own gradient.

G rows of W tokens, H heads of width D for queries and K for keys and values, C = D / 2 complex numbers of a head.

torch's attention for CPUs is tuned for long rows. For rows of 22 tokens and 8 heads of width 8, this operation takes
0.59 of torch's time (benchmarks/cost/short_rows.py).
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamppo.learner.attention import attention, layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST = 48
"""The longest row, in tokens, for which this operation is at least as fast as torch's."""


def prepare(transformer: "PreTrainedModel") -> None:
    """Replace the attention for short rows, if the `transformer` is of `FAMILIES` and has no sliding window."""
    if not attention.has_full_attention(transformer.config):
        return
    for layer in layers.layers_of(transformer):
        module: Any = layer.self_attn
        module.forward = partial(attend, module, module.forward)


def attend(
    module: Any,
    otherwise: Callable[..., Any],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    **others: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of llama, qwen2 and qwen3 for short float32 rows without a cache; else call `otherwise`."""
    rows, width = hidden_states.shape[:2]
    has_cache = any(others.get(name) is not None for name in layers.CACHE_NAMES)
    if width > LONGEST or has_cache or hidden_states.dtype is not torch.float32:
        return otherwise(hidden_states, position_embeddings, attention_mask, **others)
    query_GWHD, key_GWKD, value_GWKD = (
        project(hidden_states).view(rows, width, -1, module.head_dim)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query_GWHD, key_GWKD = module.q_norm(query_GWHD), module.k_norm(key_GWKD)
    cosine, sine = (embedding[:, None, :, : module.head_dim // 2] for embedding in position_embeddings)
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, width, width, dtype=torch.bool).tril_()
    turn_G1WC = torch.complex(cosine, sine)
    bias = torch.zeros(attention_mask.shape).masked_fill_(~attention_mask, -torch.inf)
    seen_GWHD: Any = _Attention.apply(query_GWHD, key_GWKD, value_GWKD, turn_G1WC, bias)
    return module.o_proj(seen_GWHD.reshape(rows, width, -1)), None


class _Attention(torch.autograd.Function):
    """softmax(q k' / sqrt(D) + bias) v, with q and k rotated by their positions."""

    @staticmethod
    def forward(
        ctx: Any, query_GWHD: Tensor, key_GWKD: Tensor, value_GWKD: Tensor, turn: Tensor, bias: Tensor
    ) -> Tensor:
        heads, scale = key_GWKD.shape[2], key_GWKD.shape[3] ** -0.5
        # With grouped queries, heads that share keys are rows of one matrix product.
        query, key = _rotate(query_GWHD, turn, heads), _rotate(key_GWKD, turn, heads)
        value = _fold_heads(value_GWKD, heads)
        share = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
        share.view(len(query_GWHD), -1, *bias.shape[-2:]).add_(bias)
        share = share.softmax(-1)
        ctx.save_for_backward(query, key, value, share, turn)
        ctx.scale, ctx.rows = scale, len(query_GWHD)
        return _unfold_heads(torch.bmm(share, value), *query_GWHD.shape[:2])

    @staticmethod
    def backward(ctx: Any, gradient_GWHD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, key, value, share, turn = ctx.saved_tensors
        gradient = _fold_heads(gradient_GWHD, len(key) // ctx.rows)
        grad_share = torch.bmm(gradient, value.transpose(1, 2))
        grad_score = torch._softmax_backward_data(grad_share, share, -1, share.dtype)
        shape, back = gradient_GWHD.shape[:2], turn.conj() * ctx.scale
        grad_query = _rotate_back(_unfold_heads(torch.bmm(grad_score, key), *shape), back)
        grad_key = _rotate_back(_unfold_heads(torch.bmm(grad_score.transpose(1, 2), query), *shape), back)
        return grad_query, grad_key, _unfold_heads(torch.bmm(share.transpose(1, 2), gradient), *shape), None, None


def _rotate(part_GWHD: Tensor, turn_G1WC: Tensor, heads: int) -> Tensor:
    """Rotate complex numbers. In the input all real parts precede all imaginary parts; in the result they alternate."""
    complex_GHWC = torch.complex(*part_GWHD.chunk(2, -1)).transpose(1, 2)
    turned = torch.empty(complex_GHWC.shape, dtype=complex_GHWC.dtype)
    torch.mul(complex_GHWC, turn_G1WC, out=turned)
    return torch.view_as_real(turned).view(len(turned) * heads, -1, part_GWHD.shape[-1])


def _rotate_back(part_GWHD: Tensor, back_G1WC: Tensor) -> Tensor:
    complex_GWHC = torch.view_as_complex(part_GWHD.unflatten(-1, (-1, 2))) * back_G1WC.transpose(1, 2)
    return torch.cat([complex_GWHC.real, complex_GWHC.imag], -1)


def _fold_heads(part_GWHD: Tensor, heads: int) -> Tensor:
    """[G * K, H / K * W, D]: query heads that share keys become rows of one matrix product."""
    return part_GWHD.transpose(1, 2).reshape(len(part_GWHD) * heads, -1, part_GWHD.shape[-1])


def _unfold_heads(product: Tensor, rows: int, width: int) -> Tensor:
    return product.view(rows, -1, width, product.shape[-1]).transpose(1, 2)
