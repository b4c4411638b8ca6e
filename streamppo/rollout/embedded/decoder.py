"""The forward pass of the embedded engine: its interface, and the choice of an implementation for a model.

fused_decoder.py    llama, qwen2 and qwen3, in rows within their sliding window, with few operations
model_decoder.py    other models whose attention can be replaced in transformers, with transformers' modules
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from streamppo.errors import ModelError
from streamppo.rollout import positions
from streamppo.rollout.embedded import fused_decoder, model_decoder
from streamppo.rollout.embedded.spans import Span

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)


class Decoder(Protocol):
    """A model with a cache of `rows` rows, each for one sequence. It computes logits and does not sample.

    B rows, P new tokens (padded on the right), V vocabulary. All logits are float32.
    """

    device: torch.device
    vocabulary: int

    @property
    def rows(self) -> int: ...

    @property
    def room(self) -> int:
        """The capacity of a row of the cache, in tokens."""
        ...

    def reserve(self, room: int) -> None:
        """Enlarge each row to `room` tokens, and keep its content. Raises `ModelError` without enough memory."""
        ...

    def stage(self, tensors: Mapping[str, Tensor], contents: Mapping[str, int] | None = None) -> None:
        """Write `tensors` (HF names) to spare memory, for `adopt`. Raises `WeightsError` if names or hashes differ."""
        ...

    def adopt(self) -> None:
        """Decode with the staged tensors from the next pass on; the next `stage` writes over the replaced tensors."""
        ...

    def prefill(self, tokens_BP: Tensor, lengths_B: Tensor, rows_N: Tensor, prompts_N: Tensor) -> Tensor:
        """Fill the cache of `rows_N`, each with one of B prompts; return the logits [N, V] after each row's prompt."""
        ...

    def extend(self, tokens_BP: Tensor, starts_B: Tensor, lengths_B: Tensor, first: int, longest: int) -> Tensor:
        """Feed tokens to B rows from row `first` on.

        Row `first` + b has `starts_B[b]` tokens, and gets `lengths_B[b]` more. After the call each row has at most
        `longest` tokens, and room for one more. Returns the logits [B, V] after the last token of each row.
        """
        ...

    def step(self, tokens_B: Tensor, at_B: Tensor, spans: Sequence[Span]) -> Tensor:
        """Feed one token, at position `at_B`, to each of the first B rows, span by span; return the logits [B, V]."""
        ...

    def copy(self, sources_B: Tensor, targets_B: Tensor, length: int) -> None:
        """Copy the first `length` cached tokens of rows `sources_B` to rows `targets_B`; a source may be repeated."""
        ...


def is_fused(config: "PreTrainedConfig", longest_row: int) -> bool:
    """Return True if the fused decoder can compute rows of up to `longest_row` tokens of a model of `config`."""
    window = positions.window(config)
    is_short = window is None or min(longest_row, positions.longest(config, longest_row)) <= window
    return is_short and not fused_decoder.refusal(config)


def row_limit(config: "PreTrainedConfig", longest_row: int) -> int:
    """Return the longest row, in tokens, of the decoder that `build` chooses for rows of `longest_row` tokens."""
    context, window = positions.longest(config, longest_row), positions.window(config)
    return context if window is None or not is_fused(config, longest_row) else min(context, window)


def refusal(config: "PreTrainedConfig", longest_row: int) -> str:
    """Return the reason why the embedded engine does not run a model of `config`; "" if it does."""
    reason = "" if is_fused(config, longest_row) else model_decoder.refusal(config)
    return f"the embedded engine does not run {reason}: use another rollout.engine" if reason else ""


def build(
    config: "PreTrainedConfig",
    tensors: Mapping[str, Tensor],
    *,
    longest_row: int,
    rows: int,
    dtype: torch.dtype,
    float32_head: bool,
    device: str,
) -> Decoder:
    """Build a model's decoder. Raises `ModelError` if no decoder computes the model exactly, and `WeightsError`."""
    if reason := refusal(config, longest_row):
        raise ModelError(reason)
    if is_fused(config, longest_row):
        kind = fused_decoder.FusedDecoder
    else:
        kind = model_decoder.ModelDecoder
        log.info("the embedded engine runs this %s by transformers' modules", config.model_type)
    return kind(config, tensors, rows=rows, dtype=dtype, float32_head=float32_head, device=device)
