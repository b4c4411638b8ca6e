"""The learner's attention: the choice of one, and the layout of rows that it needs.

B trajectories, L prompt + completion tokens (padded), N tokens of all rows without padding.

padded    [B, L], for sdpa and eager: causal attention keeps padding on the right from every real token
joined    [1, N], for flash-attn: rows end to end, told apart by where they begin; nothing is computed for padding
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamppo.config.sections import FLASH, Model
from streamppo.learner.batch import PaddedBatch

log = logging.getLogger(__name__)
RUNS_ON = {"flash_attention_4": (9, 10, 11), "flash_attention_3": (9,), "flash_attention_2": (8, 9, 10, 11, 12)}
"""Newest first; the major compute capabilities on which each has a deterministic backward pass."""


class Reading(NamedTuple):
    """Rows as a transformer reads them: its arguments, and the place of each row in its flattened output."""

    arguments: dict[str, Tensor | int]
    first_B: Tensor


Layout = Callable[[PaddedBatch], Reading]


def padded(rows: PaddedBatch) -> Reading:
    """Row after row, each as wide as the longest."""
    count_B, width_L = rows.inputs_BL.shape
    return Reading({"input_ids": rows.inputs_BL}, torch.arange(count_B, device=rows.start_B.device) * width_L)


def joined(rows: PaddedBatch) -> Reading:
    """One sequence without padding, in which positions begin again with every row.

    flash-attn gets the bounds as such. Every other implementation finds them in the positions and makes a mask of
    N * N entries: right, and wasteful.
    """
    width_B = rows.start_B + rows.length_B
    place_BL = torch.arange(rows.inputs_BL.shape[1], device=width_B.device).expand(rows.inputs_BL.shape)
    inside_BL = place_BL < width_B[:, None]
    bounds = torch.nn.functional.pad(width_B.cumsum(0), (1, 0))
    longest, bounds_32 = int(width_B.max()), bounds.int()
    arguments: dict[str, Tensor | int] = {
        "input_ids": rows.inputs_BL[inside_BL][None],
        "position_ids": place_BL[inside_BL][None],
        "cu_seq_lens_q": bounds_32,
        "cu_seq_lens_k": bounds_32,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return Reading(arguments, bounds[:-1])


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


def installed(name: str) -> bool:
    """True if the flash-attn called `name` can be imported, and a GPU is there for it."""
    from transformers import utils

    # The newest of them is younger than the oldest transformers that we support.
    return getattr(utils, f"is_flash_attn_{name[-1]}_available", lambda: False)()


@cache
def _warn(text: str) -> None:
    """Warn once, on rank 0: policy, critic and reference of every rank choose alike."""
    if dist.get_rank() == 0:
        log.warning("warning: %s", text)
