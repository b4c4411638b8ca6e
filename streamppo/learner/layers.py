"""The layers of a transformer: computed again in the backward pass, wholly or in part, and compiled."""

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
"""Layers keep their activations, a part of them, or their input alone, which may be in the CPU's memory."""
PLACES = ("layers", "h", "language_model.layers", "blocks")
"""The names of the layers: of most models, of GPT-2 and its like, of the text part of those that see, of MPT."""
MATRIX = ("aten::mm", "aten::addmm")
"""Names of the products of activations and weights."""
ATTENTION = ("attention", "flash_attn")
"""Parts of the names of operations that compute attention: torch's own, and those of flash-attn."""


class Selection:
    """Decides which results of a layer's forward pass are kept: attention's, and those of every second product.

    In llama's layer, whose products are q, k, v, o, gate, up and down, these are k, o and up. Memory and time lie
    between keeping everything and nothing: for a model of 7B a quarter of the activations is kept, and a third of the
    forward pass is computed again. As torchtitan's choice by operation has it.
    """

    def __init__(self) -> None:
        self._products = 0

    def keeps(self, operation: object) -> bool:
        """True if the result of the next `operation` is kept. Operations are asked about in their order."""
        name = str(getattr(operation, "name", lambda: operation)())
        if name in MATRIX:
            self._products += 1
            return self._products % 2 == 0
        return any(part in name for part in ATTENTION)


def layers_of(transformer: Any) -> Iterable[nn.Module]:
    """The layers of `transformer`. Raises `ModelError` for a model that keeps them elsewhere than under `PLACES`."""
    for place in PLACES:
        with suppress(AttributeError):
            return transformer.get_submodule(place)
    where = ", ".join(PLACES)
    raise ModelError(f"{type(transformer).__name__} keeps its layers elsewhere than under {where}: not supported")


def checkpoint_activations(transformer: "PreTrainedModel", kind: Checkpointing) -> None:
    """Let layers compute what they do not keep again in the backward pass.

    A layer checkpoints only in training mode; what is inside it stays in evaluation mode, without dropout.
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
    """Let a transformer keep what it keeps for its backward pass in the CPU's memory, if that is the `kind`."""
    if kind != "offloaded":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


def contexts() -> tuple[Any, Any]:
    """Make the contexts of one layer's forward pass and of its second one, which selects as the first did."""
    return create_selective_checkpoint_contexts(partial(_select, (Selection(), Selection())))


def _select(passes: tuple[Selection, Selection], context: Any, operation: object, *_: Any, **__: Any) -> object:
    keeps = passes[context.is_recompute].keeps(operation)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(transformer: "PreTrainedModel") -> None:
    """Compile each layer's own computation, for rows of every width; hooks and checkpointing stay around it."""
    for layer in layers_of(transformer):
        layer.forward = torch.compile(layer.forward, dynamic=True)
