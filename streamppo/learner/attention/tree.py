"""Lays out rows whose tokens are a tree (types/branches.py) as lines of a transformer's input.

B trajectories, L prompt + completion tokens (padded), G lines, W tokens of a line (padded), P pieces of all lines.

    row      0  1  2  3  4  5  6  7  8        branches (5, 2) and (8, -1)

    masked   0  1  2  3  4  5  6  7           a tree is one line: a token sees its ancestors, and its position is
             8                                their number; nothing is computed twice

    paths    0  1  2  3  4                    each leaf has a line: its ancestors in order, as in any row
             0  1  2  5  6  7
             8

With SDPA a tree is one masked line if that costs less than a line for each path. With any other attention, with a
sliding window, and for models that have state other than keys and values, each path is a line. Both give the same
scores and gradients. The result of a token is taken from its first line.
"""

from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamppo.learner.attention.attention import CPU, Layout, RowLayout, padded
from streamppo.learner.attention.prefix_sharing import work
from streamppo.learner.batch.padded import Host, SharedPrompts
from streamppo.learner.device import to_device
from streamppo.types import Ints, branches
from streamppo.types.branches import Size


class RowSizes(NamedTuple):
    """The sizes of rows: each has `lines_B` lines of at most `tokens_B` tokens, or one line without `lines_B`.

    `prompts` tells which rows share the computation of a prompt; None if no rows do.
    """

    tokens_B: Tensor
    prompts: SharedPrompts | None = None
    lines_B: Tensor | None = None


class TreeLine(NamedTuple):
    """One line: the number of its trajectory, and the indices of its tokens in that row, in the line's order."""

    row: int
    tokens: Ints


def sizes(host: Host, layout: Layout, hidden: int | None) -> RowSizes:
    """The sizes of rows in a pass over `host`, for micro-batches; `layout` and `hidden` are as in `lay_out`."""
    width_B = host.start_B + host.length_B
    if host.branches is None:
        return RowSizes(width_B)
    lengths = [_lengths(*row, hidden) for row in zip(host.branches, width_B.tolist(), strict=True)]
    if layout is not padded:
        return RowSizes(torch.tensor([sum(line_lengths) for line_lengths in lengths]))
    return RowSizes(
        torch.tensor([max(line_lengths) for line_lengths in lengths]),
        None,
        torch.tensor([len(line_lengths) for line_lengths in lengths]),
    )


def _lengths(column: bytes, width: int, hidden: int | None) -> list[int]:
    trees = branches.sizes(column, width)
    return [length for tree in trees for length in ([tree.tokens] if _is_masked(tree, hidden) else tree.paths)]


def _is_masked(tree: Size, hidden: int | None) -> bool:
    """True if a tree may be masked and the mask costs less than its paths; False for a single path."""
    return (
        hidden is not None
        and len(tree.paths) > 1
        and work(1, tree.tokens, hidden) <= sum(work(1, path, hidden) for path in tree.paths)
    )


def lay_out(host: Host, layout: Layout, hidden: int | None, device: torch.device = CPU) -> RowLayout:
    """Lay out the rows of `host`, which has branches. `hidden` is the model's width; if it is None, no tree is masked.

    If no tree is masked, `layout` lays out the lines. `layout` must be `padded` if `hidden` is not None.
    """
    assert host.branches is not None
    lines, masked = _lines(host.branches, (host.start_B + host.length_B).tolist(), hidden)
    width_G = torch.tensor([len(tree_line.tokens) for tree_line in lines])
    B, L = host.inputs_BL.shape
    source_GW = torch.full((len(lines), int(width_G.max())), -1)
    for line, source_W in zip(lines, source_GW.numpy(), strict=True):
        source_W[: len(line.tokens)] = line.tokens + line.row * L
    inputs_GW = host.inputs_BL.flatten()[source_GW.clamp(min=0)].masked_fill_(source_GW < 0, 0)
    row_layout = _masked(inputs_GW, host.branches, lines, device) if masked else layout(inputs_GW, width_G, device)
    index_N = torch.zeros(B * L, dtype=torch.long)
    is_token_GW = source_GW >= 0
    source_N = torch.full((row_layout.arguments["input_ids"].numel(),), -1)
    source_N[row_layout.index_BL[is_token_GW]] = source_GW[is_token_GW]
    # Lines are written last to first, so that the first line with a token determines its index.
    for number, line in reversed(list(enumerate(lines))):
        index_N[torch.from_numpy(line.tokens).long() + line.row * L] = row_layout.index_BL[number, : len(line.tokens)]
    return row_layout._replace(index_BL=index_N.view(B, L), source_N=source_N)


def _lines(columns: tuple[bytes, ...], widths: list[int], hidden: int | None) -> tuple[list[TreeLine], bool]:
    """The lines of all rows, and True if at least one line is a masked tree."""
    lines, masked = list[TreeLine](), False
    for row, (column, width) in enumerate(zip(columns, widths, strict=True)):
        paths = branches.paths(column, width)
        for tree, size in zip(branches.trees(column, width), branches.sizes(column, width), strict=True):
            is_masked = _is_masked(size, hidden)
            token_lists = [tree] if is_masked else [path for path in paths if path[0] == tree[0]]
            lines += [TreeLine(row, tokens) for tokens in token_lists]
            masked |= is_masked
    return lines, masked


def _masked(inputs_GW: Tensor, columns: tuple[bytes, ...], lines: list[TreeLine], device: torch.device) -> RowLayout:
    """Lay out lines with a mask: positions are depths; a token sees itself and its ancestors; padding sees all."""
    G, W = inputs_GW.shape
    position_GW, piece_GW = np.zeros((G, W), np.int64), np.zeros((G, W), np.int64)
    sees, count = [np.ones((1, W), np.bool_)], 1
    for row, members in groupby(enumerate(lines), key=lambda item: item[1].row):
        numbered = list(members)
        width = 1 + max(int(line.tokens[-1]) for _, line in numbered)
        depth, piece, sees_row = branches.depths(columns[row], width), *branches.seen(columns[row], width)
        for number, (_, tokens) in numbered:
            numbers, piece_W = np.unique(piece[tokens], return_inverse=True)
            position_GW[number, : len(tokens)], piece_GW[number, : len(tokens)] = depth[tokens], piece_W + count
            sees.append(np.zeros((len(numbers), W), np.bool_))
            sees[-1][:, : len(tokens)] = sees_row[numbers][:, tokens]
            count += len(numbers)
    sees_PW, piece_GW = to_device(torch.from_numpy(np.concatenate(sees)), device), torch.from_numpy(piece_GW)
    arguments: dict[str, Tensor | int] = {
        "input_ids": to_device(inputs_GW, device),
        "position_ids": to_device(torch.from_numpy(position_GW), device),
        "attention_mask": sees_PW[to_device(piece_GW, device)].tril_()[:, None],
    }
    return RowLayout(arguments, torch.arange(G * W).view(G, W))
