"""The layers of a transformer: computed again in the backward pass, and compiled."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from streamppo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Checkpointing: TypeAlias = Literal["off", "full", "offloaded"]
"""Layers keep their activations, or their input alone, which may be in the CPU's memory."""
PLACES = ("layers", "h", "language_model.layers", "blocks")
"""The names of the layers: of most models, of GPT-2 and its like, of the text part of those that see, of MPT."""


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
    transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers_of(transformer):
        layer.training = True


def offloading(kind: Checkpointing, device: torch.device) -> AbstractContextManager[object]:
    """Let a transformer keep what it keeps for its backward pass in the CPU's memory, if that is the `kind`."""
    if kind != "offloaded":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


def compile_layers(transformer: "PreTrainedModel") -> None:
    """Compile each layer's own computation, for rows of every width; hooks and checkpointing stay around it."""
    for layer in layers_of(transformer):
        layer.forward = torch.compile(layer.forward, dynamic=True)
