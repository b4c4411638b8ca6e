"""The engine's experts for the tokens of a batch's rows, in host memory. Pure: no Ray, no process group.

B rows, M tokens of the rows whose routes a rank has, E expert numbers per token, N tokens of a pass. Each pass copies
only the numbers of its tokens to its device. A rank has no routes for the rows of other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from streamppo.types import Trajectory, routes
from streamppo.types.routes import Numbers


@dataclass(frozen=True)
class RowRoutes:
    """The expert numbers of M tokens, rows end to end; `known_M` is True for tokens with recorded experts.

    The numbers of row b's first `count_B[b]` tokens begin at entry `begin_B[b]`. No number is above `largest`. FSDP
    would move a tuple's tensors to the GPU with a pass's other arguments, so this class is not a tuple.
    """

    numbers_ME: Tensor
    known_M: Tensor
    begin_B: Tensor
    count_B: Tensor
    largest: int

    def select(self, rows: Tensor) -> "RowRoutes":
        """Select the routes of `rows` without a copy."""
        return replace(self, begin_B=self.begin_B[rows], count_B=self.count_B[rows])

    def at(self, row_N: Tensor, token_N: Tensor) -> tuple[Tensor, Tensor]:
        """[N, E], the expert numbers of the tokens at (row, index in the row); [N], True where they are known.

        A token with index -1 has no numbers.
        """
        has_N = (token_N >= 0) & (token_N < self.count_B[row_N])
        index_N = torch.where(has_N, self.begin_B[row_N] + token_N, 0)
        return self.numbers_ME[index_N], has_N & self.known_M[index_N]


def routes_of_rows(trajectories: Sequence[Trajectory]) -> RowRoutes | None:
    """Join the routes of all rows that have them; None if no row has routes."""
    counts = [
        (len(trajectory.prompt_tokens) // 4 + trajectory.num_tokens - 1) * bool(trajectory.routes)
        for trajectory in trajectories
    ]
    parts = [
        routes.read(trajectory.routes, trajectory.route_bytes, count)
        for trajectory, count in zip(trajectories, counts, strict=True)
        if trajectory.routes
    ]
    if not parts:
        return None
    known_M = np.concatenate([known for _, known in parts])
    numbers_ME, count_B = _concatenate([numbers for numbers, _ in parts]), torch.tensor(counts)
    tensors = torch.from_numpy(numbers_ME), torch.from_numpy(known_M), count_B.cumsum(0) - count_B, count_B
    largest = int(numbers_ME.max(initial=0))
    if largest == routes.UNKNOWN:
        largest = int(numbers_ME[known_M].max(initial=0))
    return RowRoutes(*tensors, largest)


def _concatenate(rows: Sequence[Numbers]) -> Numbers:
    """Join all rows end to end, in the widest of their types; rows with fewer numbers are padded with -1."""
    wide = max(numbers.shape[1] for numbers in rows)
    if all(numbers.shape[1] == wide for numbers in rows):
        return np.concatenate(rows)
    return np.concatenate(
        [
            np.pad(numbers.astype(np.int16), ((0, 0), (0, wide - numbers.shape[1])), constant_values=-1)
            for numbers in rows
        ]
    )
