"""The division of a batch into minibatches, one per step, and of a minibatch into each rank's micro-batches.

It depends on seed, version, epoch, lengths and branches of rows, and idle rows (idle_rows.py). So a rank can find its
rows before it fetches their tokens.

B trajectories of the batch.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.config.sections import Config
from streamppo.learner.attention.prefix_sharing import work
from streamppo.learner.attention.tree import RowSizes
from streamppo.learner.batch.padded import micro_batches, row_order
from streamppo.learner.objective.idle_rows import IdleRows
from streamppo.learner.objective.objective import Epoch


class PassCosts(NamedTuple):
    """What a pass costs besides its tokens, as a number of tokens whose products in the layers cost as much.

    `gradients`: adding a weight's gradient to that of the pass before. `launches`: its operations, times the squared
    width of the model.
    """

    gradients: float
    launches: float


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
