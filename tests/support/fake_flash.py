"""A flash-attn 2 for transformers in plain torch: the package itself needs CUDA."""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from transformers import modeling_flash_attention_utils


class Call(NamedTuple):
    """One layer's call: cumulative lengths of queries and keys, the longest of each, and whether it is causal."""

    queries: list[int]
    keys: list[int]
    longest_query: int
    longest_key: int
    causal: bool


def install(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Install it for transformers; return the list of its calls."""
    calls: list[Call] = []

    def varlen(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        deterministic: bool,
    ) -> torch.Tensor:
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert isinstance(max_seqlen_q, int) and isinstance(max_seqlen_k, int)
        queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert queries[-1] == len(q) and keys[-1] == len(k) == len(v)
        calls.append(Call(queries, keys, max_seqlen_q, max_seqlen_k, causal))
        rows = zip(pairwise(queries), pairwise(keys), strict=True)
        return torch.cat(
            [attend(q[slice(*own)], k[slice(*seen)], v[slice(*seen)], softmax_scale) for own, seen in rows]
        )

    flash_utils: Any = modeling_flash_attention_utils
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    for name, function in {
        "flash_attn_func": None,
        "flash_attn_varlen_func": varlen,
        "flash_attn_with_kvcache": None,
    }.items():
        setattr(package, name, function)
    for name in ("pad_input", "unpad_input"):
        setattr(padding, name, None)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    # transformers checks for the package by the name of the attention, and rejects other names.
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setitem(flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "general_availability_check", lambda: True)
    return calls


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0) -> torch.Tensor:
    """Causal attention of one row [tokens, heads, width], aligned at the end as in flash-attn since 2.1.

    With a `window`, a token sees as many tokens, itself included.
    """
    sees = seen(len(q), len(k), window)
    turned = [x[None].transpose(1, 2) for x in (q, k, v)]
    made = torch.nn.functional.scaled_dot_product_attention(*turned, attn_mask=sees, scale=scale, enable_gqa=True)
    return made.transpose(1, 2)[0]


def seen(queries: int, keys: int, window: int = 0) -> torch.Tensor:
    """The keys that each query sees."""
    sees = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return sees.triu(1 - window + keys - queries) if window else sees
