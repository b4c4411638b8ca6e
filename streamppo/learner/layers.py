"""The layers of a transformer: activation checkpointing, full or selective, and compilation."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from streamppo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Checkpointing: TypeAlias = Literal["off", "selective", "full", "offloaded"]
"""A layer keeps all its activations, a part of them, its input, or its input in CPU memory."""
PLACES = ("layers", "h", "language_model.layers", "blocks")
"""Attribute paths of the layers: in most models, in GPT-2's family, in the text part of vision models, in MPT."""
MATRIX = ("aten::mm", "aten::addmm")
"""Operation names of products of activations and weights."""
ATTENTION = ("attention", "flash_attn")
"""Substrings in the names of attention operations: torch's, and flash-attn's."""


class Selection:
    """Selects the results of a layer's forward pass to keep: attention's, and every second product's.

    Example: of llama's products q, k, v, o, gate, up and down it keeps k, o and up. A model of 7B keeps a quarter of
    its activations and recomputes a third of its forward pass. As torchtitan's selection by operation.
    """

    def __init__(self) -> None:
        self._products = 0

    def keeps(self, operation: object) -> bool:
        """True if the result of `operation` is kept. Call it once for each operation, in order."""
        name = str(getattr(operation, "name", lambda: operation)())
        if name in MATRIX:
            self._products += 1
            return self._products % 2 == 0
        return any(part in name for part in ATTENTION)


def layers_of(transformer: Any) -> Iterable[nn.Module]:
    """The layers of `transformer`. Raises `ModelError` if they are under none of `PLACES`."""
    for place in PLACES:
        with suppress(AttributeError):
            return transformer.get_submodule(place)
    where = ", ".join(PLACES)
    raise ModelError(f"{type(transformer).__name__} keeps its layers elsewhere than under {where}: not supported")


def checkpoint_activations(transformer: "PreTrainedModel", kind: Checkpointing) -> None:
    """Let layers recompute in the backward pass the activations that they do not keep.

    Only the layer itself is set to training mode, which turns checkpointing on; its submodules stay in evaluation mode,
    without dropout.
    """
    if kind == "off":
        return
    choice: dict[str, object] = {"use_reentrant": False}
    if kind == "selective":
        choice["context_fn"] = contexts
    transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs=choice)
    for layer in layers_of(transformer):
        layer.training = True


def offloading(kind: Checkpointing, device: torch.device) -> AbstractContextManager[object]:
    """A context in which tensors saved for the backward pass are in CPU memory, if `kind` is "offloaded"."""
    if kind != "offloaded":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


def contexts() -> tuple[Any, Any]:
    """Make the contexts of one layer's forward pass and of its recomputation, which selects the same results."""
    return create_selective_checkpoint_contexts(partial(_select, (Selection(), Selection())))


def _select(passes: tuple[Selection, Selection], context: Any, operation: object, *_: Any, **__: Any) -> object:
    keeps = passes[context.is_recompute].keeps(operation)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(transformer: "PreTrainedModel") -> None:
    """Compile each layer's forward, for any width of rows; hooks and checkpointing stay outside of it."""
    for layer in layers_of(transformer):
        layer.forward = torch.compile(layer.forward, dynamic=True)
