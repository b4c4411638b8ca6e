"""The layers of a transformer: computed again in the backward pass, and compiled."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from streamppo.config.model import Model
from streamppo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Checkpointing: TypeAlias = Literal["off", "full", "offloaded"]
"""Layers keep their activations, or only their input, which may be in CPU memory."""
SIZES = 64
"""The most variants of a layer that are compiled: numbers of tokens, with and without gradient."""
PLACES = ("layers", "h", "language_model.layers", "decoder.layers", "blocks")
"""The attribute of the layers: in most models, GPT-2 and similar, text parts of vision models, OPT, MPT."""
CACHE_NAMES = ("cache", "past_key_values")
"""The argument of an attention module with its cache, in newer and in older versions of transformers."""


def parent_of_layers(transformer: Any) -> tuple[Any, str]:
    """The module that has the layers of `transformer`, and their attribute there.

    Raises `ModelError` if they are under none of `PLACES`.
    """
    for path in PLACES:
        with suppress(AttributeError):
            transformer.get_submodule(path)
            parent, _, name = path.rpartition(".")
            return transformer.get_submodule(parent), name
    paths = ", ".join(PLACES)
    raise ModelError(f"{type(transformer).__name__} is not supported: its layers are not at {paths}")


def layers_of(transformer: Any) -> Iterable[nn.Module]:
    """The layers of `transformer`. Raises `ModelError` if they are under none of `PLACES`."""
    parent, name = parent_of_layers(transformer)
    return parent.get_submodule(name)


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
    # Only newer versions of transformers have the first name, and they warn of the second.
    enable: Any = getattr(transformer, "activation_checkpointing_enable", transformer.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for layer in layers_of(transformer):
        layer.training = True


def offloading(kind: Checkpointing, device: torch.device) -> AbstractContextManager[object]:
    """A context in which tensors saved for the backward pass are in CPU memory, if `kind` is "offloaded"."""
    if kind != "offloaded":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


def compile_layers(transformer: "PreTrainedModel") -> None:
    """Compile each layer's forward; hooks and checkpointing stay outside of it.

    Padded rows are compiled for any width. Rows end to end are compiled for each number of tokens: nothing in a layer
    then depends on the first rows of a process, which differ in a resumed run. Where torch computes deterministically,
    the compiler chooses nothing by measuring.
    """
    from torch._inductor import config as compiler

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SIZES)
    # The oldest torch that is promised has no such option.
    exact = torch.are_deterministic_algorithms_enabled() and hasattr(compiler, "deterministic")
    options: Any = {"deterministic": True} if exact else {}
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Newer versions of transformers compute a layer again inside its forward, which FSDP's subclass of it would skip.
    is_inside = "__init_subclass__" in vars(GradientCheckpointingLayer)
    for layer in layers_of(transformer):
        recomputes, function = (
            is_inside and isinstance(layer, GradientCheckpointingLayer),
            cast("Any", type(layer).forward),
        )
        forward = function.__wrapped__.__get__(layer) if recomputes else layer.forward
        compiled = partial(_call, torch.compile(forward, dynamic=True, options=options))
        layer.forward = partial(_checkpointed, layer, compiled) if recomputes else compiled


def _checkpointed(layer: Any, compiled: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a compiled layer; with checkpointing it is computed again in the backward pass, its compiled code too."""
    if not (layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()):
        return compiled(*arguments, **named)
    return layer._gradient_checkpointing_func(partial(compiled, **named), *arguments)


def _call(compiled: Callable[..., Any], hidden_BWD: Tensor, **named: Any) -> Any:
    """Call a compiled layer; of rows end to end, all its tensors of a token's numbers have a size that is known."""
    if "cu_seq_lens_q" in named:
        for tensor in tree_leaves((hidden_BWD, named)):
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[:2] == hidden_BWD.shape[:2]:
                torch._dynamo.mark_static(tensor, 1)
    return compiled(hidden_BWD, **named)
