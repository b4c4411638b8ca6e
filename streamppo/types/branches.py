"""The branches of a row: its tokens as a tree that holds each token once. Pure: it imports only numpy.

A row is the tokens of a prompt and of its completion, numbered from 0. Without branches token t follows token t - 1. A
branch (start, parent) makes token `start` follow token `parent` instead, or no token if `parent` is -1. Each token
after `start` follows the previous one, up to the next branch.

    row        0  1  2  3  4  5  6  7  8       branches (5, 2) and (8, -1)
    follows   -1  0  1  2  3  2  5  6 -1
    depth      0  1  2  3  4  3  4  5  0
    paths      0 1 2 3 4      0 1 2 5 6 7      8
    trees      0 1 2 3 4 5 6 7      8

A sampled token is predicted by the row's previous token, which it must follow. So a branch must start with a token that
was not sampled. For example, two answers to one context each begin after a copy of the context's last token. The second
copy starts a branch.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from streamppo.types.wire import Flags, Ints, ints


class Piece(NamedTuple):
    """Tokens `start` to `end` - 1 of a row. Token `start` follows `parent`, each later token the previous one."""

    start: int
    end: int
    parent: int


class Size(NamedTuple):
    """The number of tokens in the tree under a root, and the number of tokens on the path to each leaf."""

    tokens: int
    paths: list[int]


def pairs(column: bytes) -> Ints:
    """Return [K, 2]: the pair (start, parent) of each branch."""
    return ints(column).reshape(-1, 2)


def column(branches: list[tuple[int, int]]) -> bytes:
    """Return the bytes column of pairs (start, parent), which are in ascending order of `start`."""
    return np.array(branches, dtype="<i4").tobytes()


def flaw(column: bytes, prompt: int, mask: Flags) -> str | None:
    """Return why a column is not a list of branches for `prompt` tokens and a completion's `mask`; None if it is."""
    if len(column) % 8:
        return f"branches of {len(column)} bytes, which are not pairs of int32"
    starts, parents = pairs(column).T.astype(np.int64)
    width = prompt + len(mask)
    if (out := (starts < prompt) | (starts >= width)).any():
        start = starts[np.argmax(out)]
        return f"a branch begins at token {start}, but the completion's tokens are {prompt} to {width - 1}"
    if (down := np.diff(starts) <= 0).any():
        before, start = starts[np.argmax(down) :][:2]
        return f"a branch that begins at token {start} is listed after one that begins at token {before}"
    if (out := (parents < -1) | (parents >= starts)).any():
        start, parent = starts[np.argmax(out)], parents[np.argmax(out)]
        return f"the branch at token {start} follows token {parent}, which is neither before it nor -1"
    if (none := parents == starts - 1).any():
        return f"the branch at token {starts[np.argmax(none)]} follows the token before it, as without a branch"
    if (sampled := mask[starts - prompt]).any():
        return f"the branch at token {starts[np.argmax(sampled)]} begins with a token that the policy sampled"
    return None


def pieces(column: bytes, width: int) -> list[Piece]:
    """Return the pieces into which branches divide a row of `width` tokens, in order."""
    branches = [(0, -1), *((int(start), int(parent)) for start, parent in pairs(column))]
    ends = [*(start for start, _ in branches[1:]), width]
    return [Piece(start, end, parent) for (start, parent), end in zip(branches, ends, strict=True)]


def depths(column: bytes, width: int) -> Ints:
    """Return [width]: the number of ancestors of each token, which is its position in its path."""
    depth = np.arange(width, dtype=np.int32)
    for start, end, parent in pieces(column, width)[1:]:
        depth[start:end] = np.arange(end - start) + (depth[parent] + 1 if parent >= 0 else 0)
    return depth


def paths(column: bytes, width: int) -> list[Ints]:
    """Return the tokens from a root to each leaf (a token that no token follows), in the order of the leaves."""
    root_paths: list[Ints] = []
    cut = pieces(column, width)
    starts, parents, before = [piece.start for piece in cut], {piece.parent for piece in cut}, list[Ints]()
    for start, end, parent in cut:
        path = np.arange(start, end, dtype=np.int32)
        if parent >= 0:
            above = before[bisect_right(starts, parent) - 1]
            path = np.concatenate([above[: int(np.searchsorted(above, parent)) + 1], path])
        before.append(path)
        if end - 1 not in parents:
            root_paths.append(path)
    return root_paths


def trees(column: bytes, width: int) -> list[Ints]:
    """Return the tokens under each root, in the order of the row."""
    root = np.arange(width, dtype=np.int32)
    for start, end, parent in pieces(column, width):
        root[start:end] = root[parent] if parent >= 0 else start
    return [np.flatnonzero(root == first).astype(np.int32) for first in np.unique(root)]


def sizes(column: bytes, width: int) -> list[Size]:
    """Return the size of each of the `trees`, in the same order."""
    cut, roots, depths, by_root = pieces(column, width), list[int](), list[int](), dict[int, Size]()
    starts, parents = [piece.start for piece in cut], {piece.parent for piece in cut}
    for start, end, parent in cut:
        at = bisect_right(starts, parent) - 1
        roots.append(roots[at] if parent >= 0 else start)
        depths.append(depths[at] + parent - starts[at] + 1 if parent >= 0 else 0)
        tokens, paths = by_root.get(roots[-1], Size(0, []))
        ends = [depths[-1] + end - start] if end - 1 not in parents else []
        by_root[roots[-1]] = Size(tokens + end - start, paths + ends)
    return list(by_root.values())


def seen(column: bytes, width: int) -> tuple[Ints, Flags]:
    """Return [width], the piece of each token, and [P, width], True at each piece's tokens and at their ancestors."""
    cut = pieces(column, width)
    piece = np.repeat(np.arange(len(cut), dtype=np.int32), [part.end - part.start for part in cut])
    is_visible = np.zeros((len(cut), width), np.bool_)
    for number, (start, end, parent) in enumerate(cut):
        if parent >= 0:
            is_visible[number, : parent + 1] = is_visible[piece[parent], : parent + 1]
        is_visible[number, start:end] = True
    return piece, is_visible
