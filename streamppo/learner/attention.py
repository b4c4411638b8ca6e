"""The learner's attention: the choice of one, and the layout of rows that it needs.

B trajectories, L prompt + completion tokens (padded), N tokens of all rows without padding.

padded    [B, L], for sdpa and eager: causal attention keeps padding on the right from every real token
joined    [1, N], for flash-attn: rows end to end, told apart by where they begin; nothing is computed for padding
shared    [G, W], for sdpa where it is less work than `padded`: the samples of a prompt as one row (learner/shared.py)

A context without gradient is read first, and the completions behind it (learner/context.py).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.config.engine import FAMILIES
from streamppo.config.sections import FLASH, Model
from streamppo.errors import ModelError
from streamppo.learner.device import to_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)
RUNS_ON = {"flash_attention_4": (9, 10, 11), "flash_attention_3": (9,), "flash_attention_2": (8, 9, 10, 11, 12)}
"""Newest first; the major compute capabilities on which each has a deterministic backward pass."""
PROBED = (5, 7)
"""Tokens of the two rows that a model reads together and alone: more than a convolution looks back on."""
LEAK = 1e-3
"""The largest difference between the two readings that is rounding, as a share of the largest entry, in float32."""
CAP = "attn_logit_softcapping"
"""transformers' name of the bound on scores of attention: flash-attn and eager attention keep to it, SDPA does not."""


class Context(NamedTuple):
    """Contexts as a transformer reads them, and `join`: (their keys, those of the completions) -> the keys of a row."""

    arguments: dict[str, Tensor | int]
    join: Callable[[Tensor, Tensor], Tensor]


class Reading(NamedTuple):
    """Rows as a transformer reads them: its arguments, and the place of each token of a row in its flattened output.

    Arguments are where the transformer is, places in the host's memory.

    Places beyond the end of a row mean nothing; -1 is a token that another rank computes (learner/ulysses.py). With a
    `context`, which is read first and without gradient, only the tokens behind it have a place.
    """

    arguments: dict[str, Any]
    place_BL: Tensor
    context: Context | None = None


Layout = Callable[[Tensor, Tensor, torch.device], Reading]
"""(inputs_BL, tokens of each row [B], both in the host's memory, the transformer's device) -> the reading."""
CPU = torch.device("cpu")


def padded(inputs_BL: Tensor, width_B: Tensor, device: torch.device = CPU) -> Reading:
    """Row after row, each as wide as the longest."""
    place_BL = torch.arange(inputs_BL.numel()).view(inputs_BL.shape)
    return Reading({"input_ids": to_device(inputs_BL, device)}, place_BL)


def joined(inputs_BL: Tensor, width_B: Tensor, device: torch.device = CPU) -> Reading:
    """One sequence without padding, in which positions begin again with every row.

    flash-attn gets the bounds as such. Every other implementation finds them in the positions and makes a mask of
    N * N entries: right, and wasteful.
    """
    place_BL = torch.arange(inputs_BL.shape[1]).expand(inputs_BL.shape)
    inside_BL = place_BL < width_B[:, None]
    longest, bounds_32 = int(width_B.max()), to_device(bounds(width_B), device)
    arguments: dict[str, Tensor | int] = {
        "input_ids": to_device(inputs_BL[inside_BL][None], device),
        "position_ids": to_device(place_BL[inside_BL][None], device),
        "cu_seq_lens_q": bounds_32,
        "cu_seq_lens_k": bounds_32,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return Reading(arguments, (width_B.cumsum(0) - width_B)[:, None] + place_BL)


def bounds(width_B: Tensor) -> Tensor:
    """[B + 1] in int32: where each of the rows begins that lie end to end, and where the last one ends."""
    return torch.nn.functional.pad(width_B.cumsum(0), (1, 0)).int()


@contextmanager
def told_apart() -> Iterator[None]:
    """Rows are told apart already: transformers does not look for several in one, for which it asks the device."""
    from transformers import masking_utils

    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks


def layout(implementation: str) -> Layout:
    """The layout of rows for `implementation`."""
    return joined if implementation in FLASH else padded


def choose(config: Model, device: str) -> str:
    """Return transformers' name of the attention: the configured one, or the newest flash-attn that runs here.

    Without one, SDPA: in float32 and on the CPU as a matter of course, else with a warning.
    """
    if config.attention != "auto":
        return config.attention
    if device != "cuda" or config.dtype == "float32":
        return "sdpa"
    major, _ = torch.cuda.get_device_capability()
    for name, capabilities in RUNS_ON.items():
        if major in capabilities and installed(name):
            return name
    _warn("no flash-attn that runs on this GPU is installed: the learner uses SDPA, which computes padding too")
    return "sdpa"


def without_leaks(chosen: str, config: Model, path: str | Path, transformers: "Sequence[PreTrainedModel]") -> str:
    """`chosen`, or SDPA if that reads rows end to end and one of `transformers` lets them see each other. A collective.

    `transformers` are whole, on the CPU, with an attention that is plain torch; rank 0 has them, the others none.
    Raises `ModelError` where the configuration insists on `chosen`.
    """
    if layout(chosen) is padded:
        return chosen
    found = [max((leak(transformer) for transformer in transformers), default=0.0)]
    dist.broadcast_object_list(found, src=0)
    if found[0] <= LEAK:
        return chosen
    why = (
        f"the model {str(path)!r} carries state from row to row where rows lie end to end, as {chosen} reads them: "
        f"its hidden states change by up to {found[0]:.0%}"
    )
    if config.attention != "auto":
        raise ModelError(f'{why}; model.attention = "sdpa" reads every row alone')
    _warn(f"{why}; the learner uses SDPA, which computes padding too")
    return "sdpa"


def with_caps(chosen: str, config: Model, configs: "Iterable[PretrainedConfig]") -> str:
    """`chosen`, or eager attention if that is SDPA and a model of `configs` caps its scores, as Gemma 2 does.

    Raises `ModelError` where the configuration insists on SDPA, which leaves the cap out without a word.
    """
    if chosen != "sdpa" or not any(getattr(one.get_text_config(), CAP, None) for one in configs):
        return chosen
    why = f"the model caps the scores of its attention ({CAP}), which SDPA leaves out"
    if config.attention != "auto":
        raise ModelError(f'{why}: choose model.attention = "auto" or "eager"')
    _warn(f"{why}: the learner uses eager attention")
    return "eager"


@torch.no_grad()
def leak(transformer: "PreTrainedModel", together: Layout = joined) -> float:
    """Read two rows `together` and alone; return the largest difference, as a share of the largest hidden state.

    The rows begin with the same token. Attention is told which tokens are of a row. Convolutions and recurrent states,
    as hybrid models have, may not be: what they keep of one row reaches the next.
    """
    width_B = torch.tensor(PROBED)
    inputs_BL = torch.arange(len(PROBED) * max(PROBED)).view(len(PROBED), -1) % transformer.config.vocab_size
    inputs_BL[:, 0] = inputs_BL[0, 0]
    reading = together(inputs_BL, width_B, CPU)
    together_ND = transformer(**reading.arguments, use_cache=False).last_hidden_state.flatten(0, 1)
    rows = [inputs_BL[row : row + 1, :width] for row, width in enumerate(PROBED)]
    alone_ND = torch.cat([transformer(input_ids=row, use_cache=False).last_hidden_state[0] for row in rows])
    place_N = torch.cat([reading.place_BL[row, :width] for row, width in enumerate(PROBED)])
    return ((together_ND[place_N] - alone_ND).abs().max() / alone_ND.abs().max()).item()


def looks_at_all(config: "PretrainedConfig", families: Sequence[str] = FAMILIES) -> bool:
    """True for a model of `families` whose attention looks at all that a mask shows, with no state but keys and values.

    A sliding window would count tokens that are not of the row.
    """
    return config.model_type in families and not getattr(config, "use_sliding_window", False)


def installed(name: str) -> bool:
    """True if the flash-attn called `name` can be imported, and a GPU is there for it."""
    from transformers import utils

    # The newest of them is younger than the oldest transformers that we support.
    return getattr(utils, f"is_flash_attn_{name[-1]}_available", lambda: False)()


@cache
def _warn(text: str) -> None:
    """Warn once, on rank 0: policy, critic and reference of every rank choose alike."""
    if dist.get_rank() == 0:
        log.warning("%s", text)
