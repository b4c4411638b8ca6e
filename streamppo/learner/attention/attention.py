"""The learner's attention: the choice of an implementation and of its layout of rows.

B trajectories, L prompt + completion tokens (padded), N tokens of all rows without padding.

padded    [B, L], for sdpa and eager: padding is on the right, where causal attention hides it from real tokens
joined    [1, N], for flash-attn: rows end to end, separated by their bounds; no padding is computed
shared    [G, W], for sdpa if it is less work than `padded`: the samples of a prompt as one row (prefix_sharing.py)
tree      [G, W] or [1, N], for rows whose tokens are a tree: one line for each root or for each leaf (tree.py)

A context that needs no gradient is computed in a separate pass before the completions (prefix_kv.py).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.config.model import JOINED, Model
from streamppo.config.rollout import FAMILIES
from streamppo.errors import ModelError
from streamppo.learner.attention import varlen
from streamppo.learner.device import from_first_rank, gather, to_device
from streamppo.weights.models import classes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
RUNS_ON = {"flash_attention_4": (9, 10, 11), "flash_attention_3": (9,), "flash_attention_2": (8, 9, 10, 11, 12)}
"""Versions of flash-attn, newest first, with the major compute capabilities of a deterministic backward pass."""
BLACKWELL, FEWER_WIDTHS, DEDICATED = (10, 11), 128, 256
"""On these GPUs flash-attn 4 takes up to `FEWER_WIDTHS` entries of a head or, without a cap of scores, `DEDICATED`."""
PROBED = (5, 7)
"""The lengths of the two rows that `leak` passes together and alone; both are longer than a convolution's window."""
LEAK = 1e-3
"""A difference between two passes of up to this share of the largest hidden state counts as float32 rounding."""
NAMES = {"sdpa": "SDPA", "eager": "eager attention", varlen.NAME: varlen.KERNEL}


class ContextPass(NamedTuple):
    """A transformer's arguments for contexts, and `join`: (context keys, completion keys) -> all keys of a row."""

    arguments: dict[str, Tensor | int]
    join: Callable[[Tensor, Tensor], Tensor]


class RowLayout(NamedTuple):
    """A layout of rows: the transformer's arguments, and each token's index in the transformer's flattened output.

    `arguments` are on the transformer's device, `index_BL` is in host memory. Indices beyond the end of a row are
    undefined; -1 marks a token of another rank (context_parallel.py). If there is a `context`, it is computed first,
    without gradient, and only the tokens after it have an index. `source_N`, for rows with branches (tree.py), is the
    index of each input token in the flattened rows; -1 for padding; a token in several lines occurs several times.
    """

    arguments: dict[str, Any]
    index_BL: Tensor
    context: ContextPass | None = None
    source_N: Tensor | None = None


Layout = Callable[[Tensor, Tensor, torch.device], RowLayout]
"""(inputs_BL, tokens of each row [B], device of the transformer) -> `RowLayout`; both tensors are in host memory."""
CPU = torch.device("cpu")


def padded(inputs_BL: Tensor, width_B: Tensor, device: torch.device = CPU) -> RowLayout:
    """Lay out one row per trajectory, padded to the longest."""
    index_BL = torch.arange(inputs_BL.numel()).view(inputs_BL.shape)
    return RowLayout({"input_ids": to_device(inputs_BL, device)}, index_BL)


def joined(inputs_BL: Tensor, width_B: Tensor, device: torch.device = CPU, *, step: int = 1) -> RowLayout:
    """Lay out all rows as one sequence without padding; positions restart at every row.

    A last row of zeros fills the sequence up to a multiple of `step` tokens. flash-attn gets the rows' bounds; any
    other implementation finds the rows by their positions and makes a mask of N * N entries.
    """
    index_BL = torch.arange(inputs_BL.shape[1]).expand(inputs_BL.shape)
    inside_BL = index_BL < width_B[:, None]
    tokens_N, positions_N = inputs_BL[inside_BL], index_BL[inside_BL]
    if missing := -len(tokens_N) % step:
        tokens_N = torch.nn.functional.pad(tokens_N, (0, missing))
        positions_N = torch.cat([positions_N, torch.arange(missing)])
        width_B = torch.cat([width_B, torch.tensor([missing])])
    longest, bounds_32 = int(width_B.max()), to_device(bounds(width_B), device)
    arguments: dict[str, Tensor | int] = {
        "input_ids": to_device(tokens_N[None], device),
        "position_ids": to_device(positions_N[None], device),
        "cu_seq_lens_q": bounds_32,
        "cu_seq_lens_k": bounds_32,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return RowLayout(arguments, (width_B.cumsum(0) - width_B)[: len(inputs_BL), None] + index_BL)


def bounds(width_B: Tensor) -> Tensor:
    """[B + 1], int32: the start of each row, if rows lie end to end, and the end of the last row."""
    return torch.nn.functional.pad(width_B.cumsum(0), (1, 0)).int()


@contextmanager
def without_packing_search() -> Iterator[None]:
    """Turn off transformers' search for packed rows, which would synchronise with the device."""
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def layout(implementation: str) -> Layout:
    """The layout of rows that `implementation` takes."""
    return joined if implementation in JOINED else padded


def choose(config: Model, device: str) -> str:
    """Return transformers' name of the attention: the configured attention, or the newest flash-attn that runs here.

    On a GPU without flash-attn the attention is "varlen" or, if torch or the GPU lacks that, SDPA, with a warning. In
    float32 and on a CPU the attention is SDPA.
    """
    if config.attention == varlen.NAME:
        return varlen.register()
    if config.attention != "auto":
        return config.attention
    if device != "cuda" or config.dtype == "float32":
        return "sdpa"
    major, _ = torch.cuda.get_device_capability()
    for name, capabilities in RUNS_ON.items():
        if major in capabilities and is_flash_installed(name):
            return name
    if varlen.is_available():
        return varlen.register()
    _warn("no flash-attn runs on this GPU, with this torch: the learner uses SDPA, which computes padding too")
    return "sdpa"


def agree_on(implementation: str) -> str:
    """Return the `implementation` of all ranks; raise `ModelError` if ranks differ, as on unlike GPUs. A collective."""
    by_rank = gather(implementation)
    if len(set(by_rank)) > 1:
        named = ", ".join(f"{name} on rank {by_rank.index(name)}" for name in dict.fromkeys(by_rank))
        raise ModelError(f"ranks would compute attention in different ways ({named}): set model.attention")
    return implementation


def leak_free_attention(
    implementation: str, config: Model, path: str | Path, transformers: "Sequence[PreTrainedModel]"
) -> str:
    """Return `implementation`, or SDPA if `implementation` joins rows and a transformer leaks state between them.

    All ranks call this. Rank 0 passes unsharded `transformers` on the CPU with plain torch attention; the other ranks
    pass an empty sequence. Raises `ModelError` instead of choosing SDPA if the configuration names the attention.
    """
    if layout(implementation) is padded:
        return implementation
    if not (sentence := from_first_rank(next(filter(None, map(_leak_sentence, transformers)), ""))):
        return implementation
    reason = f"the model {str(path)!r} carries state from row to row where rows lie end to end, as {implementation} "
    reason += f"reads them: {sentence}"
    if config.attention != "auto":
        raise ModelError(f'{reason}; model.attention = "sdpa" computes every row separately')
    _warn(f"{reason}; the learner uses SDPA, which computes padding too")
    return "sdpa"


def fall_back(implementation: str, config: Model, configs: "Iterable[PretrainedConfig]") -> str:
    """Return `implementation`, or the next of flash, varlen, SDPA and eager that computes all of the models' attention.

    Raises `ModelError` if the configuration names an implementation that leaves out a part of the attention.
    """
    model_configs = list(configs)
    after_flash = varlen.NAME if varlen.is_available() else "sdpa"
    chain = {
        **{name: (after_flash, partial(_flash_refusal, name)) for name in RUNS_ON},
        varlen.NAME: ("sdpa", varlen.refusal),
        "sdpa": ("eager", _sdpa_refusal),
    }
    while implementation in chain:
        following, refusal = chain[implementation]
        reason = next(filter(None, map(refusal, model_configs)), "")
        if not reason:
            break
        if config.attention != "auto":
            raise ModelError(f'{reason}: choose model.attention = "auto" or "eager"')
        _warn(f"{reason}: the learner uses {NAMES[following]}")
        implementation = varlen.register() if following == varlen.NAME else following
    return implementation


def _flash_refusal(name: str, config: "PretrainedConfig") -> str:
    text = config.get_text_config()
    model = varlen.model_class(text)
    if not getattr(model, "_supports_flash_attn", True):
        return f"transformers has no flash-attn for {text.model_type} models"
    # For a `name` that is not compatible, transformers would load the first compatible implementation.
    compatible = getattr(model, "_compatible_flash_implementations", None)
    if compatible is not None and name not in compatible:
        return f"{text.model_type} models are computed by {' or '.join(compatible)}, not by {name}"
    if name == "flash_attention_4" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in BLACKWELL:
        widest = max(classes.head_widths(text), default=0)
        if widest > FEWER_WIDTHS and (widest != DEDICATED or getattr(text, varlen.CAP, None)):
            return f"the model's attention has heads of {widest} entries, which {name} does not take on this GPU"
    # The interface of flash-attn 2 widens heads itself.
    return varlen.width_refusal(text, name, 1 if name == "flash_attention_2" else varlen.MULTIPLE)


def _sdpa_refusal(config: "PretrainedConfig") -> str:
    text = config.get_text_config()
    if text.model_type in varlen.SINKS:
        return "the model's attention has sinks, which SDPA leaves out"
    if getattr(text, varlen.CAP, None):
        return f"the model caps the scores of its attention ({varlen.CAP}), which SDPA leaves out"
    if not has_sdpa(text):
        return f"transformers has only eager attention for {text.model_type} models"
    return ""


def has_sdpa(text: "PretrainedConfig") -> bool:
    """True if transformers has SDPA for a model with the configuration `text`."""
    return getattr(varlen.model_class(text), "_supports_sdpa", True)


def _leak_sentence(transformer: "PreTrainedModel") -> str:
    try:
        largest = leak(transformer)
    except ValueError as error:
        # In some models, newer versions of transformers refuse rows end to end.
        return str(error)
    return "" if largest <= LEAK else f"its hidden states change by up to {largest:.0%}"


@torch.no_grad()
def leak(transformer: "PreTrainedModel", together: Layout = joined) -> float:
    """Pass two rows in the layout `together` and each alone; return the largest difference between hidden states.

    The difference is relative to the largest hidden state. Convolutions and recurrent layers may leak.
    """
    width_B = torch.tensor(PROBED)
    inputs_BL = torch.arange(len(PROBED) * max(PROBED)).view(len(PROBED), -1) % transformer.config.vocab_size
    inputs_BL[:, 0] = inputs_BL[0, 0]
    row_layout = together(inputs_BL, width_B, CPU)
    together_ND = transformer(**row_layout.arguments, use_cache=False).last_hidden_state.flatten(0, 1)
    rows = [inputs_BL[row : row + 1, :width] for row, width in enumerate(PROBED)]
    separate_ND = torch.cat([transformer(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows])
    index_N = torch.cat([row_layout.index_BL[row, :width] for row, width in enumerate(PROBED)])
    return ((together_ND[index_N] - separate_ND).abs().max() / separate_ND.abs().max()).item()


def has_full_attention(config: "PretrainedConfig", families: Sequence[str] = FAMILIES) -> bool:
    """True if a model's only state is keys and values, without a sliding window: a mask can hide any of them."""
    return config.model_type in families and not getattr(config, "use_sliding_window", False)


def is_flash_installed(name: str) -> bool:
    """True if the flash-attn `name` can be imported and a GPU is available."""
    from transformers import utils

    # The oldest supported transformers has no check for the newest flash-attn.
    return getattr(utils, f"is_flash_attn_{name[-1]}_available", lambda: False)()


@cache
def _warn(text: str) -> None:
    if dist.get_rank() == 0:
        log.warning("%s", text)
