"""The weights of a model in the decoder's layout: fused and reordered; `views` finds each tensor in them.

C width, H query heads, K key-value heads, D head width, I width of the MLP, V vocabulary.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Layer(NamedTuple):
    """The weights of one layer: one matrix for queries, keys and values; one for gate and up."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Parameters(NamedTuple):
    """All weights of a model. A tied `head` is the embedding, or a copy of it in another type."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
Shapes = Mapping[str, torch.Size]


def empty(shapes: Shapes, dtype: torch.dtype, head_dtype: torch.dtype, device: torch.device) -> Parameters:
    """Allocate the weights of a model whose tensors (HF names) have `shapes`."""

    def allocate(*names: str) -> Tensor:
        rows = sum(shapes[name][0] for name in names)
        return torch.empty((rows, *shapes[names[0]][1:]), dtype=dtype, device=device)

    def allocate_optional(*names: str) -> Tensor | None:
        return allocate(*names) if names[0] in shapes else None

    def layer(prefix: str) -> Layer:
        attention = f"{prefix}self_attn."
        return Layer(
            norm=allocate(f"{prefix}input_layernorm.weight"),
            qkv=allocate(*(f"{attention}{kind}_proj.weight" for kind in "qkv")),
            qkv_bias=allocate_optional(*(f"{attention}{kind}_proj.bias" for kind in "qkv")),
            q_norm=allocate_optional(f"{attention}q_norm.weight"),
            k_norm=allocate_optional(f"{attention}k_norm.weight"),
            out=allocate(f"{attention}o_proj.weight"),
            out_bias=allocate_optional(f"{attention}o_proj.bias"),
            mlp_norm=allocate(f"{prefix}post_attention_layernorm.weight"),
            gate_up=allocate(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"),
            down=allocate(f"{prefix}mlp.down_proj.weight"),
        )

    embedding = allocate(EMBEDDING)
    tied = HEAD not in shapes
    head = embedding if tied and head_dtype == dtype else allocate(EMBEDDING if tied else HEAD).to(head_dtype)
    count = sum(name.endswith(".input_layernorm.weight") for name in shapes)
    layers = tuple(layer(f"model.layers.{number}.") for number in range(count))
    return Parameters(embedding, layers, allocate(NORM), head)


def views(parameters: Parameters, names: Collection[str], head_width: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor's name (HF) and a view of its memory; the embedding twice if a tied head has its own memory.

    A view has the elements in the order of the tensor, perhaps in more dimensions. For queries and keys, the memory has
    the two elements of each rotated pair side by side; the tensor has all first elements, then all second ones.
    """
    yield EMBEDDING, parameters.embedding
    yield NORM, parameters.norm
    if HEAD in names:
        yield HEAD, parameters.head
    elif parameters.head is not parameters.embedding:
        yield EMBEDDING, parameters.head
    for number, layer in enumerate(parameters.layers):
        for name, view in _layer_parameters(layer, head_width):
            yield f"model.layers.{number}.{name}", view


def _layer_parameters(layer: Layer, head_width: int) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.norm
    yield "post_attention_layernorm.weight", layer.mlp_norm
    yield "self_attn.o_proj.weight", layer.out
    yield "mlp.down_proj.weight", layer.down
    gate, up = layer.gate_up.chunk(2)
    yield "mlp.gate_proj.weight", gate
    yield "mlp.up_proj.weight", up
    # `qkv` has as many rows for values as for keys, and as many for queries as the output projection has inputs.
    queries = layer.out.shape[1]
    for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if fused is not None:
            q, k, v = fused.split([queries, *[(len(fused) - queries) // 2] * 2])
            yield f"self_attn.q_proj.{kind}", _halves(q, head_width)
            yield f"self_attn.k_proj.{kind}", _halves(k, head_width)
            yield f"self_attn.v_proj.{kind}", v
    for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
        if norm is not None:
            yield f"self_attn.{name}.weight", _halves(norm, head_width)
    if layer.out_bias is not None:
        yield "self_attn.o_proj.bias", layer.out_bias


def _halves(paired: Tensor, head_width: int) -> Tensor:
    """View the adjacent pairs of each head in the order of the tensor: all first elements, then all second ones."""
    return paired.view(-1, head_width // 2, 2, *paired.shape[1:]).transpose(1, 2)
