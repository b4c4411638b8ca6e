"""What a task is: an endless seeded stream of training prompts, and a fixed list of held-out ones."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from streamppo.config import ArithmeticTask, FilesTask
from streamppo.tasks.arithmetic import Arithmetic
from streamppo.tasks.files import Files
from streamppo.types import Prompt


class Rows(Protocol):
    """The finite rows behind a task."""

    @property
    def training(self) -> Sequence[Prompt]:
        """Rows that are trained on."""
        ...

    @property
    def held_out(self) -> Sequence[Prompt]:
        """Rows that are only evaluated on."""
        ...


class Task:
    """Prompt number p is row `permutation(seed, epoch)[p % n]` with epoch = p // n.

    It is a function of (configuration, seed, p) alone: whoever holds an identity can rebuild its prompt, and a
    resumed run goes on with the very prompts that it would have had.
    """

    def __init__(self, name: str, rows: Rows, seed: int) -> None:
        self.name = name
        self.rows = rows
        self._seed = seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def prompt(self, number: int) -> Prompt:
        """Prompt `number` >= 0 of the training stream."""
        epoch, position = divmod(number, len(self.rows.training))
        if epoch != self._epoch:
            self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self.rows.training))
            self._epoch = epoch
        return self.rows.training[int(self._order[position])]

    def held_out(self, limit: int) -> Sequence[Prompt]:
        """The first `limit` held-out prompts: the same ones in every evaluation."""
        return self.rows.held_out[:limit]


def build(config: ArithmeticTask | FilesTask, seed: int) -> Task:
    """The task that the configuration names. Raises `TaskError` if its data cannot be read."""
    match config:
        case ArithmeticTask():
            return Task("arithmetic", Arithmetic(config.first, config.second, config.held_out, seed), seed)
        case FilesTask():
            return Task("files", Files(config, seed), seed)
