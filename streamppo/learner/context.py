"""The context of completions without gradient: its keys and values are computed first, the completions against them.

B trajectories, L prompt + completion tokens (padded), C tokens of a context (padded), G different contexts, S tokens
with gradient (padded), N the same of all rows end to end.

The context of a row is all tokens before its completion but the last one. That one predicts the completion's first
token, and is computed with the completion, with gradient. For the log-prob or value f of a completion's token, with
k_c and v_c the keys and values of context token c in a layer,

    attached    df/dw along all paths: the true gradient
    detached    df/dw with all k_c and v_c constant: without the paths through the hidden states of the context

Values of f are the same. A context token costs a forward pass in place of a forward and a backward pass, about a third,
and keeps nothing for the backward pass but its keys and values.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from streamppo.config.engine import FAMILIES
from streamppo.errors import ModelError
from streamppo.learner import attention, layers
from streamppo.learner.attention import CPU, Context, Reading
from streamppo.learner.device import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "context"
"""The argument of a transformer, and so of its attention modules, that brings the keys and values."""


class Kept:
    """Keeps keys and values of every layer, in the place of a transformer's cache."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keep `keys` and `values`, and return them: the context sees itself alone."""
        self.layers[layer] = keys, values
        return keys, values


class Joining:
    """Puts the kept keys and values beside those of the tokens that are computed against them."""

    def __init__(self, kept: Kept, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._kept = kept
        self._join = join

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a layer's attention looks at. A backward pass may ask again."""
        kept_keys, kept_values = self._kept.layers[layer]
        return self._join(kept_keys, keys), self._join(kept_values, values)


def prepare(transformers: "Iterable[PreTrainedModel]") -> None:
    """Let `transformers` take keys and values of a context; to do so again changes nothing.

    Attention modules get them as their cache, in each layer's own computation: a layer that is checkpointed refuses
    caches at its door. Raises `ModelError` for a model that may keep more of a context than keys and values.
    """
    for transformer in transformers:
        if not attention.looks_at_all(transformer.config):
            raise ModelError(
                f"queue.segments.prefix = 'detached' knows models of {', '.join(FAMILIES)} without a sliding window, "
                f"and {transformer.name_or_path!r} ({transformer.config.model_type}) is another: choose 'attached'"
            )
        for layer in layers.layers_of(transformer):
            module: Any = layer.self_attn
            if _hand_over not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _hand_over(_: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if NAME in named:
        named["past_key_values"] = named.pop(NAME)
    return arguments, named


def keys_and_values(transformer: Any, context: Context) -> dict[str, Joining]:
    """The argument that brings a context's keys and values, without gradient, to the completions behind it."""
    kept = Kept()
    with torch.no_grad():
        transformer(**context.arguments, use_cache=False, **{NAME: kept})
    return {NAME: Joining(kept, context.join)}


def padded(inputs_BL: Tensor, start_B: Tensor, width_B: Tensor, device: torch.device = CPU, *, share: bool) -> Reading:
    """Rows of [C] and [S] tokens, with a mask of S * (C + S) entries; with `share`, equal contexts are one row.

    Padding on the right of a context is hidden by the mask. There is always a context token to compute, seen or not:
    on every rank the pass is a collective.
    """
    first_B = start_B - 1
    B, L = inputs_BL.shape
    C, S = max(1, int(first_B.max())), int((width_B - first_B).max())
    contexts, row_B = inputs_BL[:, :C], torch.arange(B)
    is_seen_BC = torch.arange(C) < first_B[:, None]
    if share:
        contexts, row_B = contexts.masked_fill(~is_seen_BC, 0).unique(dim=0, return_inverse=True)
    place_BS = first_B[:, None] + torch.arange(S)
    inputs_BS = inputs_BL.gather(1, place_BS.clamp(max=L - 1))
    place_BL = torch.arange(B)[:, None] * S - first_B[:, None] + torch.arange(L)
    is_seen_BC, row_B = to_device(is_seen_BC, device), to_device(row_B, device)
    own_BSS = torch.ones(S, S, dtype=torch.bool, device=device).tril_().expand(B, S, S)
    arguments: dict[str, Tensor | int] = {
        "input_ids": to_device(inputs_BS, device),
        "position_ids": to_device(place_BS, device),
        "attention_mask": torch.cat([is_seen_BC[:, None].expand(B, S, C), own_BSS], 2)[:, None],
    }

    def join(kept: Tensor, own: Tensor) -> Tensor:
        return torch.cat([kept[row_B] if share else kept, own], 2)

    return Reading(arguments, place_BL, Context({"input_ids": to_device(contexts, device)}, join))


def joined(inputs_BL: Tensor, start_B: Tensor, width_B: Tensor, device: torch.device = CPU) -> Reading:
    """Contexts end to end, then completions end to end; flash-attn gets the bounds of queries and of keys.

    Its causal mask is aligned at the end: the last query of a row sees all keys of the row. A context without tokens
    is one token that nobody sees, so that no row of flash-attn is empty.
    """
    first_B = start_B - 1
    contexts = attention.joined(inputs_BL, first_B.clamp(min=1), device)
    own_B, place_L = width_B - first_B, torch.arange(inputs_BL.shape[1])
    is_context_BL, inside_BL = place_L < first_B[:, None], place_L < width_B[:, None]
    is_own_BL = inside_BL & ~is_context_BL
    begin_B = own_B.cumsum(0) - own_B
    place_BL = begin_B[:, None] + place_L - first_B[:, None]
    num_context = int(first_B.clamp(min=1).sum())
    order_N = to_device(torch.where(is_context_BL, contexts.place_BL, num_context + place_BL)[inside_BL], device)
    arguments: dict[str, Tensor | int] = {
        "input_ids": to_device(inputs_BL[is_own_BL][None], device),
        "position_ids": to_device(place_L.expand(inputs_BL.shape)[is_own_BL][None], device),
        "cu_seq_lens_q": to_device(attention.bounds(own_B), device),
        "cu_seq_lens_k": to_device(attention.bounds(width_B), device),
        "max_length_q": int(own_B.max()),
        "max_length_k": int(width_B.max()),
    }

    def join(kept: Tensor, own: Tensor) -> Tensor:
        return torch.cat([kept, own], 2).index_select(2, order_N)

    return Reading(arguments, place_BL, Context(contexts.arguments, join))
