"""Rows end to end in which each prompt occurs once; attention repeats the prompt's keys for each completion.

B trajectories, L prompt + completion tokens (padded), N tokens with each prompt once, K keys of all rows of attention,
P tokens that are keys of several rows, H heads of width D.

    prompt p0 p1 p2, samples a0 a1 and b0 b1 b2:

    tokens      p0 p1 p2 a0 a1 b0 b1 b2       computed once: embeddings, norms, products
    positions    0  1  2  3  4  3  4  5
    queries     [p0 p1 p2] [a0 a1]          [b0 b1 b2]
    keys        [p0 p1 p2] [p0 p1 p2 a0 a1] [p0 p1 p2 b0 b1 b2]

Attention is causal and aligned at the end of each row, so it equals attention over unshared rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.learner.attention import attention
from streamppo.learner.attention.attention import CPU, RowLayout
from streamppo.learner.attention.prefix_kv import NAME
from streamppo.learner.attention.prefix_sharing import SharingPlan, plan
from streamppo.learner.device import to_device


class SharedKeys(NamedTuple):
    """The indices that repeat keys for the rows of attention and add up the gradients of repeated keys.

    `token_K` is the token of each key, `first_N` the first key of each token. `places_PR` has all keys of each token of
    `repeated_P`, padded with K.
    """

    token_K: Tensor
    first_N: Tensor
    repeated_P: Tensor
    places_PR: Tensor

    def update(
        self, keys_1HND: Tensor, values_1HND: Tensor, layer: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Stand in for a transformer's cache: return a layer's keys and values, repeated for each row that has them."""
        keys, values = _repeat([keys_1HND, values_1HND], *self)
        return keys, values


def lay_out(
    inputs_BL: Tensor, start_B: Tensor, width_B: Tensor, device: torch.device = CPU, *, step: int = 1
) -> RowLayout:
    """Lay out rows end to end, each prompt once, filled up with zeros to a multiple of `step` tokens."""
    sharing_plan = plan(inputs_BL, start_B, width_B)
    if len(sharing_plan.width_G) == len(width_B):
        return attention.joined(inputs_BL, width_B, device, step=step)
    return shared(inputs_BL, start_B, width_B, sharing_plan, device, step=step)


def shared(
    inputs_BL: Tensor, start_B: Tensor, width_B: Tensor, plan: SharingPlan, device: torch.device = CPU, *, step: int = 1
) -> RowLayout:
    """Lay out rows by `plan`: the tokens of each prompt, followed by its completions."""
    position_L = torch.arange(inputs_BL.shape[1])
    first_B = (plan.width_G.cumsum(0) - plan.width_G)[plan.row_B]
    is_prompt_BL, inside_BL = position_L < start_B[:, None], position_L < width_B[:, None]
    completion_BL = (first_B + plan.begin_B - start_B)[:, None] + position_L
    token_BL = torch.where(is_prompt_BL, first_B[:, None] + position_L, completion_BL)
    token_N, size = token_BL[inside_BL], int(plan.width_G.sum())
    missing = -size % step

    def fill_row(column_BL: Tensor) -> Tensor:
        # All samples of a prompt write the same numbers.
        column_N = torch.zeros(size + missing, dtype=column_BL.dtype).scatter_(0, token_N, column_BL[inside_BL])
        return to_device(column_N[None], device)

    queries, keys, trajectories = _rows(start_B, width_B, plan)
    key_tokens = [token_BL[row, :width] for row, width in zip(trajectories, keys, strict=True)]
    if missing:
        queries, keys = [*queries, missing], [*keys, missing]
        key_tokens.append(torch.arange(size, size + missing))
    arguments: dict[str, object] = {
        "input_ids": fill_row(inputs_BL),
        "position_ids": fill_row(position_L.expand(inputs_BL.shape)),
        "cu_seq_lens_q": to_device(attention.bounds(torch.tensor(queries)), device),
        "cu_seq_lens_k": to_device(attention.bounds(torch.tensor(keys)), device),
        "max_length_q": max(queries),
        "max_length_k": max(keys),
        NAME: _shared_keys(torch.cat(key_tokens), size + missing, device),
    }
    return RowLayout(arguments, token_BL)


def _rows(start_B: Tensor, width_B: Tensor, plan: SharingPlan) -> tuple[list[int], list[int], list[int]]:
    """The rows of attention, in the order of their queries: numbers of queries, numbers of keys, and trajectories."""
    rows: list[tuple[int, int, int]] = []
    starts, widths, samples, last_group = start_B.tolist(), width_B.tolist(), plan.row_B.bincount().tolist(), -1
    by_place = plan.begin_B.argsort(stable=True)
    for row in by_place[plan.row_B[by_place].argsort(stable=True)].tolist():
        group, start, width = int(plan.row_B[row]), starts[row], widths[row]
        is_alone = samples[group] == 1
        if group != last_group and not is_alone:
            rows.append((start, start, row))
        rows.append((width if is_alone else width - start, width, row))
        last_group = group
    queries, keys, trajectories = (list(column) for column in zip(*rows, strict=True))
    return queries, keys, trajectories


def _shared_keys(token_K: Tensor, size: int, device: torch.device) -> SharedKeys:
    order_K = token_K.argsort(stable=True)
    count_N = token_K.bincount(minlength=size)
    begin_N = count_N.cumsum(0) - count_N
    repeated_P = (count_N > 1).nonzero()[:, 0]
    number_R = torch.arange(int(count_N.max()))
    entry_PR = (begin_N[repeated_P, None] + number_R).clamp(max=len(order_K) - 1)
    places_PR = torch.where(number_R < count_N[repeated_P, None], order_K[entry_PR], len(token_K))
    return SharedKeys(*(to_device(tensor, device) for tensor in (token_K, order_K[begin_N], repeated_P, places_PR)))


# Custom operations prevent a compiler from choosing the order in which gradients are added.
@torch.library.custom_op("streamppo::repeat_keys", mutates_args=())
def _repeat(
    tensors: list[Tensor], token_K: Tensor, first_N: Tensor, repeated_P: Tensor, places_PR: Tensor
) -> list[Tensor]:
    return [tensor.index_select(-2, token_K) for tensor in tensors]


@torch.library.custom_op("streamppo::repeat_keys_backward", mutates_args=())
def _add_gradients(gradients: list[Tensor], first_N: Tensor, repeated_P: Tensor, places_PR: Tensor) -> list[Tensor]:
    """The gradient of each token, summed over its keys; the backward of `index_select` would sort all keys first."""
    sums: list[Tensor] = []
    for gradient in gradients:
        padded = torch.nn.functional.pad(gradient, (0, 0, 0, 1))
        parts = padded.index_select(-2, places_PR.flatten()).unflatten(-2, places_PR.shape)
        summed = parts.sum(-2, dtype=torch.float32).to(gradient.dtype)
        sums.append(gradient.index_select(-2, first_N).index_copy_(-2, repeated_P, summed))
    return sums


@_repeat.register_fake
@_add_gradients.register_fake
def _(tensors: list[Tensor], tokens: Tensor, *_: Tensor) -> list[Tensor]:
    return [tensor.new_empty(*tensor.shape[:-2], len(tokens), tensor.shape[-1]) for tensor in tensors]


_repeat.register_autograd(
    lambda ctx, gradients: (_add_gradients(gradients, *ctx.saved_tensors), None, None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[2:]),
)
