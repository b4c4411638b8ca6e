"""The samples of a prompt as one row: the prompt is computed once for all of them, forward and backward.

B trajectories, L prompt + completion tokens (padded), G different prompts, W tokens of a prompt and all its completions
(padded).

    prompt p0 p1 p2, samples a0 a1 and b0 b1 b2:

    row         p0 p1 p2 a0 a1 b0 b1 b2
    position     0  1  2  3  4  3  4  5
    b1 sees      x  x  x        x  x          the prompt, and its own completion so far
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from streamppo.learner.attention.attention import CPU, LEAK, RowLayout, has_full_attention, leak, padded
from streamppo.learner.device import from_first_rank, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORTH = 0.9
"""Samples of a prompt share a row if the shared layout needs at most this share of the padded layout's work."""


class SharingPlan(NamedTuple):
    """The row of each trajectory [B], the index of its completion in that row [B], and the tokens of every row [G]."""

    row_B: Tensor
    begin_B: Tensor
    width_G: Tensor


def can_share(transformers: "Sequence[PreTrainedModel]") -> bool:
    """True if packing the samples of a prompt into one row changes no output of any of `transformers`.

    All ranks call this. Rank 0 passes unsharded `transformers` on the CPU with plain torch attention; the other ranks
    pass an empty sequence.
    """
    probes = ((transformer, partial(_probe, dtype=transformer.dtype)) for transformer in transformers)
    shares = (has_full_attention(model.config) and leak(model, probe) <= LEAK for model, probe in probes)
    return from_first_rank(all(shares))


def lay_out(inputs_BL: Tensor, start_B: Tensor, width_B: Tensor, hidden: int, device: torch.device = CPU) -> RowLayout:
    """Lay out rows shared or, if that is less work at width `hidden`, padded; completions begin at `start_B`."""
    shared_plan = plan(inputs_BL, start_B, width_B)
    rows, width = len(shared_plan.width_G), int(shared_plan.width_G.max())
    if work(rows, width, hidden) > WORTH * work(len(inputs_BL), inputs_BL.shape[1], hidden):
        return padded(inputs_BL, width_B, device)
    return shared(inputs_BL, start_B, width_B, shared_plan, device)


def work(rows: int, width: int, hidden: int) -> float:
    """The work of a layer, in units of its matrix products for one token.

    With a model width of D, a token's products take about 24 D * D operations, and attention over W tokens 4 W D.
    """
    return rows * width * (1 + width / (6 * hidden))


def plan(inputs_BL: Tensor, start_B: Tensor, width_B: Tensor) -> SharingPlan:
    """Put trajectories with the same prompt tokens into one row, in their order."""
    position_L = torch.arange(inputs_BL.shape[1], device=inputs_BL.device)
    # The fill value -1 is not a token, so no prompt equals the beginning of a longer prompt.
    prompts_BL = inputs_BL.masked_fill(position_L >= start_B[:, None], -1)
    row_B = number(prompts_BL)
    order_B = row_B.argsort(stable=True)
    completion_B = (width_B - start_B)[order_B]
    before_B = completion_B.cumsum(0) - completion_B
    count_G = row_B.bincount()
    first_G = count_G.cumsum(0) - count_G
    in_row_B = before_B - before_B[first_G][row_B[order_B]]
    begin_B = torch.empty_like(start_B)
    begin_B[order_B] = start_B[order_B] + in_row_B
    last_G = order_B[first_G + count_G - 1]
    return SharingPlan(row_B, begin_B, begin_B[last_G] + (width_B - start_B)[last_G])


def number(rows_BL: Tensor) -> Tensor:
    """[B], a number for each row of integers, counted from 0; equal rows have equal numbers."""
    # Hashing each row (a sum with odd factors) is faster than torch's `unique` of rows; collisions are detected.
    factor_L = torch.randint(2**62, rows_BL.shape[1:], generator=torch.Generator().manual_seed(0)) * 2 + 1
    _, number_B = (rows_BL * factor_L.to(rows_BL.device)).sum(1).unique(return_inverse=True)
    index_B = torch.arange(len(rows_BL), device=rows_BL.device)
    last_G = index_B.new_zeros(len(rows_BL)).scatter_reduce_(0, number_B, index_B, "amax")
    if torch.equal(rows_BL, rows_BL[last_G[number_B]]):
        return number_B
    return rows_BL.unique(dim=0, return_inverse=True)[1]


def shared(
    inputs_BL: Tensor, start_B: Tensor, width_B: Tensor, plan: SharingPlan, device: torch.device = CPU
) -> RowLayout:
    """Lay out one row for each prompt by `plan`. Padding sees the prompt and padding; no token sees padding."""
    G, W = len(plan.width_G), int(plan.width_G.max())
    position_BL = torch.arange(inputs_BL.shape[1]).expand(inputs_BL.shape)
    is_prompt_BL = position_BL < start_B[:, None]
    inside_BL = position_BL < width_B[:, None]
    in_row_BL = torch.where(is_prompt_BL, position_BL, plan.begin_B[:, None] + position_BL - start_B[:, None])
    index_BL = plan.row_B[:, None] * W + in_row_BL
    # All samples of a prompt write the same tokens to the prompt's indices.
    index_N, prompt = index_BL[inside_BL], len(inputs_BL)
    branch_BL = torch.arange(prompt)[:, None].masked_fill(is_prompt_BL, prompt)

    def fill_rows(column_BL: Tensor, padding: int) -> Tensor:
        row_N = torch.full((G * W,), padding, dtype=column_BL.dtype)
        row_N[index_N] = column_BL[inside_BL]
        return to_device(row_N.view(G, W), device)

    branch_GW = fill_rows(branch_BL, -1)
    sees_GWW = (branch_GW[:, None] == prompt) | (branch_GW[:, None] == branch_GW[:, :, None])
    arguments: dict[str, Tensor | int] = {
        "input_ids": fill_rows(inputs_BL, 0),
        "position_ids": fill_rows(position_BL, 0),
        "attention_mask": sees_GWW.tril_()[:, None],
    }
    return RowLayout(arguments, index_BL)


def _probe(inputs_BL: Tensor, width_B: Tensor, device: torch.device, *, dtype: torch.dtype) -> RowLayout:
    """Lay out rows that share their first token, with an additive mask: the dtype's lowest number hides a token."""
    start_B = torch.ones_like(width_B)
    row_layout = shared(inputs_BL, start_B, width_B, plan(inputs_BL, start_B, width_B), device)
    sees = row_layout.arguments["attention_mask"]
    assert isinstance(sees, Tensor)
    added = torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
    return row_layout._replace(arguments={**row_layout.arguments, "attention_mask": added})
