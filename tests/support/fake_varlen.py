"""Torch's `varlen_attn` in plain torch, as an operation that a compiler does not look into: the kernel needs CUDA."""

from itertools import pairwise
from typing import Any

import fake_flash
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen


@torch.library.custom_op("streamppo_tests::varlen", mutates_args=())
def _attend(tensors: list[Tensor], queries: Tensor, keys: Tensor, sizes: list[int], scale: float) -> Tensor:
    """`sizes` are the longest row of queries, that of keys, and the window, 0 for none."""
    query, key, value = tensors
    assert queries.dtype == keys.dtype == torch.int32
    assert queries[-1] == len(query) and keys[-1] == len(key) == len(value)
    *longest, window = sizes
    assert longest == [int(bounds.diff().max()) for bounds in (queries, keys)]
    parts = rows(queries, keys)
    return torch.cat([fake_flash.attend(query[own], key[seen], value[seen], scale, window) for own, seen in parts])


@_attend.register_fake
def _like(tensors: list[Tensor], *_: object) -> Tensor:
    return torch.empty_like(tensors[0], memory_format=torch.contiguous_format)


@torch.library.custom_op("streamppo_tests::varlen_backward", mutates_args=())
def _backward(
    gradient: Tensor, tensors: list[Tensor], queries: Tensor, keys: Tensor, window: int, scale: float
) -> list[Tensor]:
    query, key, value = tensors
    # An operation computes without autograd.
    made = [torch.zeros_like(one, dtype=torch.float64) for one in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for own, seen in rows(queries, keys):
        g, q = (one[own].double().transpose(0, 1) for one in (gradient, query))
        k, v = (one[seen].double().repeat_interleave(groups, 1).transpose(0, 1) for one in (key, value))
        share = _shares(q, k, scale, window)
        of_share = g @ v.mT
        of_score = share * (of_share - (of_share * share).sum(-1, keepdim=True)) * scale
        made[0][own] += (of_score @ k).transpose(0, 1)
        for total, part in ((made[1], of_score.mT @ q), (made[2], share.mT @ g)):
            total[seen] += part.transpose(0, 1).unflatten(1, (-1, groups)).sum(2)
    return [total.to(one.dtype).contiguous() for total, one in zip(made, (query, key, value), strict=True)]


@_backward.register_fake
def _likes(gradient: Tensor, tensors: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(one, memory_format=torch.contiguous_format) for one in tensors]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, queries, keys, (_, _, ctx.window), ctx.scale = inputs
    ctx.save_for_backward(*tensors, queries, keys)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *tensors, queries, keys = ctx.saved_tensors
    return _backward(gradient, tensors, queries, keys, ctx.window, ctx.scale), None, None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)


def rows(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice]]:
    """The queries and the keys of each row."""
    pairs = zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True)
    return [(slice(*own), slice(*seen)) for own, seen in pairs]


def _shares(query: Tensor, key: Tensor, scale: float, window: int) -> Tensor:
    """The softmax of causal scores, aligned at the end: [heads, queries, keys]."""
    sees = fake_flash.seen(query.shape[1], key.shape[1], window)
    return (query @ key.mT * scale).masked_fill(~sees, -torch.inf).softmax(-1)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install it as torch's kernel."""

    def varlen_attn(*tensors: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
        query, key, value, queries, keys, *longest = tensors
        assert enable_gqa and window_size[1] == 0
        return _attend([query, key, value], queries, keys, [*longest, window_size[0] + 1], scale)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
