"""The layers of a transformer: their checkpointing, which recomputes activations, and their compilation."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from streamppo.config.model import Model
from streamppo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Checkpointing: TypeAlias = Literal["off", "full", "offloaded"]
"""What a layer keeps for the backward pass: all activations, only its input, or its input in CPU memory."""
SIZES = 64
"""Maximum number of compiled variants of a layer: one for each number of tokens, with and without gradient."""
PLACES = ("layers", "h", "decoder.layers", "blocks")
"""Attributes that may hold the layers of: most models; GPT-2 and similar; OPT; MPT."""
CACHE_NAMES = ("cache", "past_key_values")
"""The name of an attention module's argument for a cache, in newer and in older versions of transformers."""


def parent_of_layers(transformer: Any) -> tuple[Any, str]:
    """Return the module with the layers of `transformer`, and its attribute. Raises `ModelError` if none is found."""
    for path in PLACES:
        with suppress(AttributeError):
            transformer.get_submodule(path)
            parent, _, name = path.rpartition(".")
            return transformer.get_submodule(parent), name
    paths = ", ".join(PLACES)
    raise ModelError(f"{type(transformer).__name__} is not supported: its layers are not at {paths}")


def layers_of(transformer: Any) -> Iterable[nn.Module]:
    """Return the layers of `transformer`. Raises `ModelError` as `parent_of_layers` does."""
    parent, name = parent_of_layers(transformer)
    return parent.get_submodule(name)


def kind(config: Model) -> Checkpointing:
    """The checkpointing that `config` sets; an unresolved "auto" keeps all activations."""
    return "off" if config.gradient_checkpointing == "auto" else config.gradient_checkpointing


def checkpoint_activations(transformer: "PreTrainedModel", kind: Checkpointing) -> None:
    """Let layers recompute, in the backward pass, the activations that they do not keep; compile layers before.

    transformers itself recomputes only layers in training mode, in which OPT and Falcon drop entries at random.
    """
    for layer in () if kind == "off" else layers_of(transformer):
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., object], *arguments: object, **named: object) -> object:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(partial(forward, **named), *arguments, use_reentrant=False, preserve_rng_state=False)


def offloading(kind: Checkpointing, device: torch.device) -> AbstractContextManager[object]:
    """A context that moves tensors saved for the backward pass to CPU memory, if `kind` is "offloaded"."""
    if kind != "offloaded":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


def compile_layers(transformer: "PreTrainedModel") -> None:
    """Compile each layer's forward; hooks stay outside of the compiled code.

    For padded rows a layer is compiled once. For rows end to end it is compiled for each number of tokens: code for any
    number would depend on the first rows of a process, which differ in a resumed run. If torch is deterministic, the
    compiler does not pick kernels by timing them (the oldest supported torch has no such option).
    """
    from torch._inductor import config as compiler

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SIZES)
    # The oldest supported torch has no option `deterministic`.
    exact = torch.are_deterministic_algorithms_enabled() and hasattr(compiler, "deterministic")
    options: Any = {"deterministic": True} if exact else {}
    for layer in layers_of(transformer):
        layer.forward = partial(_call, torch.compile(layer.forward, dynamic=True, options=options))


def _call(compiled: Callable[..., object], hidden_BWD: Tensor, **named: object) -> object:
    """Call a compiled layer; for rows end to end, mark the number of tokens of all its tensors as static."""
    if "cu_seq_lens_q" in named:
        for tensor in tree_leaves((hidden_BWD, named)):
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[:2] == hidden_BWD.shape[:2]:
                torch._dynamo.mark_static(tensor, 1)
    return compiled(hidden_BWD, **named)
