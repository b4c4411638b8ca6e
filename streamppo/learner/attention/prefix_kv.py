"""Contexts without gradient: their keys and values are computed first, then the completions.

B trajectories, L prompt + completion tokens (padded), C tokens of a context (padded), G different contexts, S tokens
with gradient (padded), N tokens of all rows end to end.

A row's context is all tokens before its completion, except the token right before it, which predicts the completion's
first token. Let f be the log-prob or value of a completion's token, and k_c and v_c the keys and values of context
token c in a layer:

    attached    df/dw along all paths: the true gradient
    detached    df/dw with all k_c and v_c constant: without the paths through the context's hidden states
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from streamppo.config.rollout import FAMILIES
from streamppo.errors import ModelError
from streamppo.learner.attention import attention, layers
from streamppo.learner.attention.attention import CPU, ContextPass, RowLayout
from streamppo.learner.device import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "context"
"""The name of the argument by which a context's keys and values reach a transformer's attention modules."""


class PrefixCache:
    """Stands in for a transformer's cache, whose arguments vary by version, and keeps all keys and values."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.layers[layer] = keys, values
        return keys, values


class ContextJoin:
    """Joins the kept keys and values of a context with those of its completions."""

    def __init__(self, cache: PrefixCache, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._cache = cache
        self._join = join

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the keys and values for a layer's attention. A layer's recomputation may call this method again."""
        context_keys, context_values = self._cache.layers[layer]
        return self._join(context_keys, keys), self._join(context_values, values)


def prepare(transformers: "Iterable[PreTrainedModel]") -> None:
    """Let `transformers` accept the keys and values of a context. Idempotent.

    A hook inside each layer gives them to the attention module as its cache: a checkpointed layer accepts no cache as
    an argument. Raises `ModelError` for a model whose state is more than keys and values.
    """
    for transformer in transformers:
        if not attention.has_full_attention(transformer.config):
            raise ModelError(
                f"queue.segments.prefix = 'detached' needs one of {', '.join(FAMILIES)}, without a sliding window, "
                f"and {transformer.name_or_path!r} is {transformer.config.model_type}: choose 'attached'"
            )
        for layer in layers.layers_of(transformer):
            module: Any = layer.self_attn
            if _set_cache not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_set_cache, with_kwargs=True)


def _set_cache(_: nn.Module, arguments: object, named: dict[str, object]) -> tuple[object, dict[str, object]]:
    if NAME in named:
        # A layer passes its cache, which is None, under a name that depends on the version of transformers.
        named[next(name for name in layers.CACHE_NAMES if name in named)] = named.pop(NAME)
    return arguments, named


def keys_and_values(transformer: Any, context: ContextPass) -> dict[str, ContextJoin]:
    """Compute a context without gradient; return its keys and values as an argument for the completions' pass."""
    cache = PrefixCache()
    with torch.no_grad():
        transformer(**context.arguments, use_cache=False, **{NAME: cache})
    return {NAME: ContextJoin(cache, context.join)}


def padded(
    inputs_BL: Tensor, start_B: Tensor, width_B: Tensor, device: torch.device = CPU, *, share: bool
) -> RowLayout:
    """Lay out rows of [C] and [S] tokens, with a mask of S * (C + S) entries; with `share`, equal contexts are one row.

    At least one context token is computed, even if it is hidden, because the pass is a collective of all ranks.
    """
    first_B = start_B - 1
    B, L = inputs_BL.shape
    C, S = max(1, int(first_B.max())), int((width_B - first_B).max())
    contexts, row_B = inputs_BL[:, :C], torch.arange(B)
    is_seen_BC = torch.arange(C) < first_B[:, None]
    if share:
        contexts, row_B = contexts.masked_fill(~is_seen_BC, 0).unique(dim=0, return_inverse=True)
    position_BS = first_B[:, None] + torch.arange(S)
    inputs_BS = inputs_BL.gather(1, position_BS.clamp(max=L - 1))
    index_BL = torch.arange(B)[:, None] * S - first_B[:, None] + torch.arange(L)
    is_seen_BC, row_B = to_device(is_seen_BC, device), to_device(row_B, device)
    causal_BSS = torch.ones(S, S, dtype=torch.bool, device=device).tril_().expand(B, S, S)
    arguments: dict[str, Tensor | int] = {
        "input_ids": to_device(inputs_BS, device),
        "position_ids": to_device(position_BS, device),
        "attention_mask": torch.cat([is_seen_BC[:, None].expand(B, S, C), causal_BSS], 2)[:, None],
    }

    def join(context: Tensor, completion: Tensor) -> Tensor:
        return torch.cat([context[row_B] if share else context, completion], 2)

    return RowLayout(arguments, index_BL, ContextPass({"input_ids": to_device(contexts, device)}, join))


def joined(inputs_BL: Tensor, start_B: Tensor, width_B: Tensor, device: torch.device = CPU) -> RowLayout:
    """Lay out contexts end to end, then completions end to end; flash-attn gets the bounds of queries and keys.

    flash-attn's causal mask is aligned at the end: a row's last query sees all of the row's keys. An empty context is
    one hidden token, because flash-attn does not take empty rows.
    """
    first_B = start_B - 1
    contexts = attention.joined(inputs_BL, first_B.clamp(min=1), device)
    count_B, position_L = width_B - first_B, torch.arange(inputs_BL.shape[1])
    is_context_BL, inside_BL = position_L < first_B[:, None], position_L < width_B[:, None]
    is_completion_BL = inside_BL & ~is_context_BL
    begin_B = count_B.cumsum(0) - count_B
    index_BL = begin_B[:, None] + position_L - first_B[:, None]
    num_context = int(first_B.clamp(min=1).sum())
    order_N = to_device(torch.where(is_context_BL, contexts.index_BL, num_context + index_BL)[inside_BL], device)
    arguments: dict[str, Tensor | int] = {
        "input_ids": to_device(inputs_BL[is_completion_BL][None], device),
        "position_ids": to_device(position_L.expand(inputs_BL.shape)[is_completion_BL][None], device),
        "cu_seq_lens_q": to_device(attention.bounds(count_B), device),
        "cu_seq_lens_k": to_device(attention.bounds(width_B), device),
        "max_length_q": int(count_B.max()),
        "max_length_k": int(width_B.max()),
    }

    def join(context: Tensor, completion: Tensor) -> Tensor:
        return torch.cat([context, completion], 2).index_select(2, order_N)

    return RowLayout(arguments, index_BL, ContextPass(contexts.arguments, join))
