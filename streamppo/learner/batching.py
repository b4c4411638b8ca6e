"""The division of a batch into minibatches, one per step, and of a minibatch into each rank's micro-batches.

It depends on seed, version, epoch, lengths and branches of rows, and idle rows (idle_rows.py). So a rank can find its
rows before it fetches their tokens.

B trajectories of the batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamppo.config.sections import Config
from streamppo.learner.attention.prefix_sharing import WORTH, work
from streamppo.learner.attention.tree import RowSizes
from streamppo.learner.batch.padded import SharedPrompts, row_order
from streamppo.learner.objective.idle_rows import IdleRows
from streamppo.learner.objective.objective import Epoch


class PassCosts(NamedTuple):
    """What a pass costs besides its tokens, as a number of tokens whose products in the layers cost as much.

    `gradients`: adding a weight's gradient to that of the pass before. `launches`: its operations, times the squared
    width of the model.
    """

    gradients: float
    launches: float


MUCH = 1 / 16
"""By default padding of this share of a micro-batch's budget costs as much as another micro-batch."""
ON_CPU, ON_GPU = PassCosts(25, 5e5), PassCosts(250, 5e9)
"""Measured on a CPU at widths of 64, 256 and 512. For a GPU computed: 40 % of an H100's peak, its memory, and 10
microseconds a launch.
"""


class Division(NamedTuple):
    """The division for `rank` of `ranks`, for a model of width `hidden`; `is_padded` if its layout pads rows."""

    config: Config
    rank: int
    ranks: int
    hidden: int
    is_padded: bool
    costs: PassCosts

    @property
    def overhead(self) -> float | None:
        """The padding, in tokens, that costs as much as another micro-batch; None on several ranks, for the default."""
        return None if self.ranks > 1 else self.costs.gradients + self.costs.launches / self.hidden**2

    def minibatches(self, num_rows: int, version: int, epoch: Epoch) -> tuple[Tensor, ...]:
        """Split the rows by seed, version and epoch only; a single minibatch keeps the batch's order."""
        if epoch.minibatches == 1:
            return (torch.arange(num_rows),)
        return row_order(num_rows, self.config.seed, version, epoch.number).chunk(epoch.minibatches)

    def micro_batches(self, sizes: RowSizes, rows: Tensor) -> list[Tensor]:
        """This rank's micro-batches of `rows`; every rank has the same number of them, and some may be empty."""
        budget = self.config.learner.micro_batch_tokens
        tokens_B, prompts, lines_B = sizes
        by_rank = micro_batches(
            rows,
            tokens_B,
            budget,
            self.ranks,
            padded=self.is_padded,
            work=partial(work, 1, hidden=self.hidden),
            lines_B=lines_B,
            prompts=prompts,
            overhead=self.overhead,
        )
        return by_rank[self.rank]

    def are_one_pass(self, sizes: RowSizes, pieces: Sequence[Tensor]) -> bool:
        """True if the micro-batches `pieces` take no more memory than one of them may; on several ranks if it is one.

        Rows of very different lengths are several micro-batches though they would fit into one.
        """
        if len(pieces) <= 1 or self.ranks > 1:
            return len(pieces) == 1
        tokens_B, _, lines_B = sizes
        lines_B = torch.ones_like(tokens_B) if lines_B is None else lines_B
        widths_B = (tokens_B[rows].max().expand(len(rows)) if self.is_padded else tokens_B[rows] for rows in pieces)
        tokens = sum(int((width_b * lines_B[rows]).sum()) for width_b, rows in zip(widths_B, pieces, strict=True))
        return tokens <= self.config.learner.micro_batch_tokens

    def own_rows(self, sizes: RowSizes, version: int, epochs: Sequence[Epoch], chosen: IdleRows) -> list[int]:
        """The rows whose tokens this rank reads in an update: the rows of its passes, and the `STAND_IN`."""
        num_rows = len(sizes.tokens_B)
        passes = [chosen.scored_B.nonzero()[:, 0]]
        passes += [chosen.select(rows) for epoch in epochs for rows in self.minibatches(num_rows, version, epoch)]
        pieces = [piece for rows in passes for piece in self.micro_batches(sizes, rows)]
        return torch.cat([*pieces, STAND_IN]).unique().tolist()


STAND_IN = torch.tensor([0])
"""The row of an empty micro-batch: its pass is a collective, and its result is not used."""


# --- micro-batches -----------------------------------------------------------------------------------------------


def micro_batches(
    rows: Tensor,
    tokens_B: Tensor,
    budget: int,
    ranks: int,
    *,
    padded: bool = True,
    work: Callable[[int], float] = float,
    lines_B: Tensor | None = None,
    prompts: SharedPrompts | None = None,
    overhead: float | None = None,
) -> list[list[Tensor]]:
    """Split `rows` into micro-batches of at most `budget` tokens; entry r is for rank r.

    If rows are `padded`, each counts the tokens of its micro-batch's longest row. `work` is the cost of a row by its
    number of tokens, by default that number. A row may be several lines, `lines_B`, of at most `tokens_B` tokens.

    Every micro-batch is a collective, so every rank gets the same number of them: some are empty where rows run out.
    Rows go longest first, each to the rank with the least work so far: padding is short, and loads differ by at most
    one row. A row longer than the budget is alone in its micro-batch. Short and long rows get separate micro-batches
    where that saves more padding than `overhead`, the work of another micro-batch in tokens, unless the samples of
    `prompts` as one row each are less work. Of rows that are not padded, the samples of a prompt are in as few
    micro-batches as possible, each of which computes those of `prompts` once.
    """
    by_length = rows[torch.argsort(tokens_B[rows], descending=True, stable=True)]
    lines_B = torch.ones_like(tokens_B) if lines_B is None else lines_B
    dealt = [by_length] if ranks == 1 else _dealt(by_length, tokens_B, lines_B, ranks, work)
    if padded:
        costs = PaddingCosts(work, MUCH * budget if overhead is None else overhead)
        shares = [_split_padded(mine, tokens_B, lines_B, budget, prompts, costs) for mine in dealt]
    else:
        shares = [_split_joined(mine, tokens_B, budget, prompts) for mine in dealt]
    num_batches = max(map(len, shares))
    return [share + [by_length[:0]] * (num_batches - len(share)) for share in shares]


def _dealt(
    by_length: Tensor, tokens_B: Tensor, lines_B: Tensor, ranks: int, work: Callable[[int], float]
) -> list[Tensor]:
    """The rows of each rank: each row, in order, goes to the rank with the least work so far."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    rows = zip(by_length.tolist(), tokens_B[by_length].tolist(), lines_B[by_length].tolist(), strict=True)
    for row, tokens, lines in rows:
        lightest = loads.index(min(loads))
        dealt[lightest].append(row)
        loads[lightest] += lines * work(tokens)
    return [torch.tensor(own_rows, dtype=torch.long) for own_rows in dealt]


class PaddingCosts(NamedTuple):
    """Whether rows of different lengths are padded to one: the `work` of a line by its tokens, and `overhead`, that of
    another micro-batch.
    """

    work: Callable[[int], float]
    overhead: float


def _split_padded(
    rows: Tensor, tokens_B: Tensor, lines_B: Tensor, budget: int, prompts: SharedPrompts | None, costs: PaddingCosts
) -> list[Tensor]:
    """Rows are longest first, so the first row of a micro-batch is its width."""
    tokens, lines, start = tokens_B[rows].tolist(), lines_B[rows].tolist(), 0
    pieces: list[Tensor] = []
    while start < len(tokens):
        end, num_lines = start + 1, lines[start]
        while end < len(tokens) and (num_lines + lines[end]) * tokens[start] <= budget:
            num_lines += lines[end]
            end += 1
        pieces += _split_by_length(rows[start:end], tokens_B, lines_B, prompts, costs)
        start = end
    return pieces


def _split_by_length(
    rows: Tensor, tokens_B: Tensor, lines_B: Tensor, prompts: SharedPrompts | None, costs: PaddingCosts
) -> list[Tensor]:
    """Split one micro-batch by length, unless a row for each prompt is less work."""
    tokens, lines = tokens_B[rows].numpy(), lines_B[rows].numpy()
    pieces = _spans_of_similar(tokens, lines, costs.overhead)
    if len(pieces) > 1 and prompts is not None:
        apart = sum(costs.work(int(tokens[begin])) * int(lines[begin:end].sum()) for begin, end in pieces)
        if _shared_work(rows, tokens_B, prompts, costs.work) <= WORTH * (apart + costs.overhead * (len(pieces) - 1)):
            return [rows]
    return [rows[begin:end] for begin, end in pieces]


def _spans_of_similar(tokens: np.ndarray, lines: np.ndarray, overhead: float) -> list[tuple[int, int]]:
    """The begin and end of micro-batches, each padded to its first row: cut in two where that saves the most padding.

    Example: of rows with 40, 38, 4, 3 and 2 tokens a cut after 38 saves 3 * 36 tokens.
    """
    # A row after the cut is padded to the first one there in place of the first of all.
    saved = (tokens[0] - tokens) * np.cumsum(lines[::-1])[::-1]
    cut = int(saved.argmax())
    if saved[cut] <= overhead:
        return [(0, len(tokens))]
    after = _spans_of_similar(tokens[cut:], lines[cut:], overhead)
    return [
        *_spans_of_similar(tokens[:cut], lines[:cut], overhead),
        *((cut + begin, cut + end) for begin, end in after),
    ]


def _shared_work(rows: Tensor, tokens_B: Tensor, prompts: SharedPrompts, work: Callable[[int], float]) -> float:
    """The work of `rows` with one line for each prompt, which all its completions follow."""
    _, group_b = prompts.group_B[rows].unique(return_inverse=True)
    widths_G = torch.zeros(int(group_b.max()) + 1, dtype=torch.long)
    widths_G.scatter_reduce_(0, group_b, prompts.shared_B[rows], "amax")
    widths_G.index_add_(0, group_b, tokens_B[rows] - prompts.shared_B[rows])
    return len(widths_G) * work(int(widths_G.max()))


def _split_joined(rows: Tensor, tokens_B: Tensor, budget: int, prompts: SharedPrompts | None) -> list[Tensor]:
    """Rows in their order, and the samples of a prompt one after the other."""
    if prompts is None:
        prompts = SharedPrompts(torch.arange(len(tokens_B)), torch.zeros_like(tokens_B))
    else:
        rows = rows[prompts.group_B[rows].argsort(stable=True)]
    pieces: list[Tensor] = []
    start, size, before = 0, 0, None
    columns = (column[rows].tolist() for column in (tokens_B, *prompts))
    for end, (tokens, group, shared) in enumerate(zip(*columns, strict=True)):
        more = tokens - shared if group == before else tokens
        if end > start and size + more > budget:
            pieces.append(rows[start:end])
            start, size, more = end, 0, tokens
        size, before = size + more, group
    return [*pieces, rows[start:]] if len(rows) else []
