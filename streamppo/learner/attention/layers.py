"""The layers of a transformer: computed again in the backward pass, and compiled."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from streamppo.config.sections import Model
from streamppo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Checkpointing: TypeAlias = Literal["off", "full", "offloaded"]
"""Layers keep their activations, or only their input, which may be in CPU memory."""
PLACES = ("layers", "h", "language_model.layers", "blocks")
"""The attribute of the layers: in most models, in GPT-2 and similar, in the text part of vision models, in MPT."""


def layers_of(transformer: Any) -> Iterable[nn.Module]:
    """The layers of `transformer`. Raises `ModelError` if they are under none of `PLACES`."""
    for place in PLACES:
        with suppress(AttributeError):
            return transformer.get_submodule(place)
    where = ", ".join(PLACES)
    raise ModelError(f"{type(transformer).__name__} has its layers elsewhere than under {where}: not supported")


def kind(config: Model) -> Checkpointing:
    """The checkpointing of `config`; "auto" that no rank has resolved keeps all activations."""
    return "off" if config.gradient_checkpointing == "auto" else config.gradient_checkpointing


def checkpoint_activations(transformer: "PreTrainedModel", kind: Checkpointing) -> None:
    """Let layers recompute in the backward pass the activations that they do not keep.

    Only the layer itself is set to training mode, which turns checkpointing on; its submodules stay in evaluation mode,
    without dropout.
    """
    if kind == "off":
        return
    transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers_of(transformer):
        layer.training = True


def offloading(kind: Checkpointing, device: torch.device) -> AbstractContextManager[object]:
    """A context in which tensors saved for the backward pass are in CPU memory, if `kind` is "offloaded"."""
    if kind != "offloaded":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


def compile_layers(transformer: "PreTrainedModel") -> None:
    """Compile each layer's forward, for any width of rows; hooks and checkpointing stay outside of it."""
    for layer in layers_of(transformer):
        layer.forward = torch.compile(layer.forward, dynamic=True)
