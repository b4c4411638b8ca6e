"""Torch's flash attention for rows end to end, "varlen". N tokens of all queries, K of all keys; H heads of width D."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamppo.errors import ModelError
from streamppo.weights.models import classes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "varlen"
KERNEL = f'torch\'s flash attention (model.attention = "{NAME}")'
CAP = "attn_logit_softcapping"
"""transformers' field for a bound on attention scores, which only flash-attn and eager attention apply."""
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""transformers' names of the arguments with the bounds and greatest lengths of rows."""
WIDEST, MULTIPLE = 256, 8
"""Flash attention takes heads of at most `WIDEST` entries, a multiple of `MULTIPLE`."""
SINKS = ("gpt_oss", "deepseek_v4", "flint", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash")
"""Values of model_type whose attention adds a learned score that belongs to no token."""
_registered: dict[str, Callable[..., object]] = {}
"""Torch's kernel, by `NAME`, after `register` has registered it with transformers."""


def is_available() -> bool:
    """True if this GPU runs the kernel."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def register() -> str:
    """Register the kernel with transformers, which makes no mask for it; return its name.

    A second call changes nothing, because context parallelism may have wrapped the kernel meanwhile. torch 2.15 would
    choose cuDNN's kernels for some rows, even in deterministic mode, so cuDNN is turned off.
    """
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface

    if _registered.get(NAME) is varlen_attn:
        return NAME
    _registered[NAME] = varlen_attn
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Since torch 2.12, a flag must allow several query heads to share keys.
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    kernel = partial(varlen_attn, enable_gqa=True) if has_flag else varlen_attn
    AttentionInterface.register(NAME, partial(attend, kernel))
    return NAME


def refusal(config: "PretrainedConfig") -> str:
    """The reason why the kernel cannot compute the attention of a model of transformers' `config`; "" if it can."""
    text = config.get_text_config()
    if not getattr(model_class(text), "_supports_attention_backend", False):
        return f"transformers cannot replace the attention of {text.model_type} models by {KERNEL}"
    if reason := width_refusal(text, KERNEL):
        return reason
    if getattr(text, CAP, None):
        return f"the model caps the scores of its attention, which {KERNEL} leaves out"
    if text.model_type in SINKS:
        return f"the model's attention has sinks, which {KERNEL} leaves out"
    return ""


def model_class(text: "PretrainedConfig") -> object:
    """transformers' class for a model of the configuration `text`, with flags of what it supports; None if unknown."""
    from transformers import MODEL_MAPPING

    return MODEL_MAPPING.get(type(text), None)


def width_refusal(text: "PretrainedConfig", kernel: str, multiple: int = 1) -> str:
    """The reason why `kernel` cannot compute heads of the widths in `text`; "" if it can. It needs a `multiple`."""
    widths = classes.head_widths(text)
    if max(widths, default=0) > WIDEST:
        return f"the model's attention has heads of {max(widths)} entries, and {kernel} takes {WIDEST}"
    if odd := next((width for width in widths if width % multiple), 0):
        return f"the model's attention has heads of {odd} entries, and {kernel} takes multiples of {multiple}"
    return ""


def attend(
    kernel: Callable[..., Any],
    module: Any,
    query_1HND: Tensor,
    key_1HKD: Tensor,
    value_1HKD: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **named: object,
) -> tuple[Tensor, None]:
    """Causal attention, aligned at the end of each row: [1, N, H, D]. Raises `ModelError` for sinks or a score cap."""
    if any(named.get(name) is not None for name in ("softcap", "s_aux")):
        raise ModelError(f"{type(module).__name__} caps its scores or has sinks, and {KERNEL} leaves both out")
    own, width = query_1HND.shape[-1], value_1HKD.shape[-1]
    # Entries of 0 change no score, and give outputs that are cut off.
    wide = -(-max(own, width) // MULTIPLE) * MULTIPLE
    query, key, value = (_widened(tensor[0], wide).transpose(0, 1) for tensor in (query_1HND, key_1HKD, value_1HKD))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    bounds = (named[name] for name in BOUNDS)
    scale = own**-0.5 if scaling is None else scaling
    return kernel(query, key, value, *bounds, scale=scale, window_size=window)[None, ..., :width], None


def _widened(heads_HKD: Tensor, width: int) -> Tensor:
    missing = width - heads_HKD.shape[-1]
    return torch.nn.functional.pad(heads_HKD, (0, missing)) if missing else heads_HKD
