"""Replaces the attention of transformers' modules by attention over a cache of fixed rows.

B rows, P new tokens (padded on the right), T cached tokens, H query heads, K key-value heads, D head width.

transformers calls a registered attention function in each layer. The function here, `attend`, also gets an
`AttentionPass`, which writes keys and values to the layer's cache and computes each row's attention to its cached
tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from streamppo.rollout.embedded.spans import Span

NAME = "streamppo_rows"
LAYERS = ("full_attention", "sliding_attention")
"""transformers' kinds of layers that this attention computes."""


class RowCache:
    """Keys and values of every layer, [rows, room, K, D] each. `windows` are the layers' sliding windows (0: none)."""

    def __init__(self, rows: int) -> None:
        self.rows, self.room = rows, 0
        self.windows = set[int]()
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def token_bytes(self) -> int:
        """Bytes of one cached token, in all layers."""
        return sum(tensor[0, 0].nbytes for layer in self._layers.values() for tensor in layer)

    def layer(self, number: int, key_BPKD: Tensor, value_BPKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's cached keys and values; the first call allocates them for entries like the given ones."""
        if number not in self._layers:
            self._layers[number] = self._zeros(key_BPKD), self._zeros(value_BPKD)
        return self._layers[number]

    def _zeros(self, entries_BPKD: Tensor) -> Tensor:
        return entries_BPKD.new_zeros(self.rows, self.room, *entries_BPKD.shape[2:])

    def enlarge(self, room: int) -> None:
        more = (0, 0, 0, 0, 0, room - self.room)
        self._layers = {
            number: (F.pad(keys, more), F.pad(values, more)) for number, (keys, values) in self._layers.items()
        }
        self.room = room

    def copy(self, sources_B: Tensor, targets_B: Tensor, length: int) -> None:
        for layer in self._layers.values():
            for tensor in layer:
                # `index_copy_` copies whole rows; assignment by index would copy element by element.
                tensor[:, :length].index_copy_(0, targets_B, tensor[:, :length].index_select(0, sources_B))


class AttentionRule(NamedTuple):
    """A layer's attention: scale and soft cap of the scores, window, and sinks [H], scores that belong to no token."""

    scale: float
    cap: float | None = None
    window: int | None = None
    sinks_H: Tensor | None = None


class AttentionPass:
    """One forward pass: where its tokens are written, and which tokens each of them attends to.

    `at_BP` are the tokens' positions. The tokens of sequence b are written to row `first` + b of the cache. A prefill
    instead has `copies`, the pair (`rows_N`, `prompts_N`): the tokens of sequence `prompts_N[n]` are written to row
    `rows_N[n]`. Without `spans`, as in a prefill, tokens attend only to tokens of this pass.
    """

    def __init__(
        self,
        cache: RowCache,
        at_BP: Tensor,
        *,
        first: int = 0,
        spans: Sequence[Span] = (),
        copies: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._cache, self._at_BP, self._first = cache, at_BP, first
        self._rows_B1 = torch.arange(first, first + len(at_BP), device=at_BP.device)[:, None]
        self._spans, self._copies = spans, copies
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def attend(
        self, layer: int, query_BHPD: Tensor, key_BKPD: Tensor, value_BKPD: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Write keys and values of a layer, and return its attention [B, P, H, D]; padding rows get zeros."""
        B = len(self._at_BP)
        query, key_BPKD, value_BPKD = query_BHPD[:B], key_BKPD[:B].transpose(1, 2), value_BKPD[:B].transpose(1, 2)
        keys, values = self._cache.layer(layer, key_BPKD, value_BPKD)
        self._cache.windows.add(rule.window or 0)
        self._write(keys, key_BPKD)
        self._write(values, value_BPKD)
        parts = [(query, key_BPKD, value_BPKD)]
        if self._spans:
            parts = [
                (query[span.first : span.end], self._read(keys, span), self._read(values, span)) for span in self._spans
            ]
        attended = [
            attention(q, k.transpose(1, 2), v.transpose(1, 2), self._mask(number, rule.window), rule)
            for number, (q, k, v) in enumerate(parts)
        ]
        joined_BPHD = (attended[0] if len(attended) == 1 else torch.cat(attended)).transpose(1, 2)
        return F.pad(joined_BPHD, (0, 0, 0, 0, 0, 0, 0, len(query_BHPD) - B)).contiguous()

    def _write(self, cached: Tensor, new_BPKD: Tensor) -> None:
        if self._copies is None:
            cached[self._rows_B1, self._at_BP] = new_BPKD
        else:
            rows_N, prompts_N = self._copies
            cached[:, : new_BPKD.shape[1]].index_copy_(0, rows_N, new_BPKD.index_select(0, prompts_N))

    def _read(self, tensor: Tensor, span: Span) -> Tensor:
        return tensor[self._first + span.first : self._first + span.end, : span.longest]

    def _mask(self, number: int, window: int | None) -> Tensor | None:
        """Return the mask [b, 1, P, T] of a span for layers with this window; None for plain causal attention."""
        key = number, window
        if key not in self._masks:
            self._masks[key] = self._make_mask(number, window)
        return self._masks[key]

    def _make_mask(self, number: int, window: int | None) -> Tensor | None:
        P = self._at_BP.shape[1]
        if not self._spans and (window is None or window >= P):
            return None
        span = self._spans[number] if self._spans else Span(0, 1, P)
        at_b1P1 = self._at_BP[span.first : span.end, None, :, None]
        places_T = torch.arange(span.longest, device=self._at_BP.device)
        visible = places_T <= at_b1P1
        return visible if window is None else visible & (places_T > at_b1P1 - window)


def attention(q_bHPD: Tensor, k_bKTD: Tensor, v_bKTD: Tensor, mask_b1PT: Tensor | None, rule: AttentionRule) -> Tensor:
    """Compute attention [b, H, P, D], causal if there is no mask. Soft caps and sinks are computed without SDPA."""
    groups = q_bHPD.shape[1] // k_bKTD.shape[1]
    if rule.cap is None and rule.sinks_H is None:
        return F.scaled_dot_product_attention(
            q_bHPD,
            k_bKTD,
            v_bKTD,
            attn_mask=mask_b1PT,
            is_causal=mask_b1PT is None,
            scale=rule.scale,
            enable_gqa=groups > 1,
        )
    if mask_b1PT is None:
        P = q_bHPD.shape[2]
        mask_b1PT = torch.ones(P, P, dtype=torch.bool, device=q_bHPD.device).tril()
    keys_bHTD, values_bHTD = k_bKTD.repeat_interleave(groups, 1), v_bKTD.repeat_interleave(groups, 1)
    scores_bHPT = q_bHPD @ keys_bHTD.transpose(2, 3) * rule.scale
    if rule.cap is not None:
        scores_bHPT = torch.tanh(scores_bHPT / rule.cap) * rule.cap
    scores_bHPT = scores_bHPT.masked_fill(~mask_b1PT, -torch.inf).float()
    if rule.sinks_H is not None:
        sinks_bHP1 = rule.sinks_H.float().view(1, -1, 1, 1).expand(*scores_bHPT.shape[:3], 1)
        scores_bHPT = torch.cat([scores_bHPT, sinks_bHP1], -1)
    weights_bHPT = scores_bHPT.softmax(-1).to(values_bHTD.dtype)[..., : keys_bHTD.shape[2]]
    return weights_bHPT @ values_bHTD


def attend(
    module: Any,
    query_BHPD: Tensor,
    key_BKPD: Tensor,
    value_BKPD: Tensor,
    attention_mask: None = None,
    *,
    attention_pass: AttentionPass,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """Compute attention for transformers, which chooses the names of these arguments."""
    scale = query_BHPD.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, softcap, sliding_window, s_aux)
    return attention_pass.attend(module.layer_idx, query_BHPD, key_BKPD, value_BKPD, rule), None


def register(note_window: Callable[[int], object] = lambda _: None) -> str:
    """Register this attention with transformers; return its name. `note_window` gets each mask's window (0: none)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def mask(*_: object, local_size: int | None = None, **_named: object) -> None:
        note_window(local_size or 0)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    return NAME
