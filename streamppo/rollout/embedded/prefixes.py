"""Rows whose completions have ended and whose keys and values stay in the cache, for prompts that continue them.

A prompt begins from the tokens that it has in common with such a row if it continues a completion: if these reach
beyond the row's root, the prompt from which its first completion was sampled. Samples of one prompt have no more than
their root in common, and are prefilled together.

Example: a row of prompt [1, 2], completion [3, 4], has the root 2, and the cache holds [1, 2, 3], because the last
token was never fed. The prompt [1, 2, 3, 4, 5] begins from 3 tokens, [1, 2, 3, 9] from 3, and [1, 2, 5] from none.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from streamppo.types import Ints

LEAST = 32
"""Fewer tokens than this are computed anew: on a small model that is faster than to copy them."""


NONE: Ints = np.zeros(0, np.int32)


class Prefix(NamedTuple):
    """A row's `tokens`, of which the first `cached` are in the cache, and the first `root` were its first prompt.

    `computed` are the versions whose weights computed these `cached` ones.
    """

    tokens: Ints
    cached: int
    root: int
    computed: Ints

    def common(self, prompt: Ints) -> int:
        """The number of cached tokens from which `prompt` can begin; one of its tokens at least is left to compute."""
        tokens, root = self.tokens, self.root
        # Most rows differ from most prompts in one of these two tokens.
        if min(len(prompt), len(tokens)) <= max(root, LEAST) or prompt[root] != tokens[root] or prompt[0] != tokens[0]:
            return 0
        both = min(len(prompt), len(tokens))
        differ = np.flatnonzero(prompt[:both] != tokens[:both])
        common = int(differ[0]) if len(differ) else both
        usable = min(common, self.cached, len(prompt) - 1)
        return usable if common > root and usable >= LEAST else 0


class Start(NamedTuple):
    """`common` tokens of a prompt are in the cache of `row`, whose first prompt had `root` tokens; 0: in none.

    `computed` are the versions whose weights computed them.
    """

    row: int
    common: int
    root: int
    computed: Ints = NONE


class Prefixes:
    """At most one prefix in each row that runs no completion, the least recently used first."""

    def __init__(self) -> None:
        self._rows: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, prefix: Prefix) -> None:
        """Note that `row`, which has ended, holds `prefix`, if it is long enough to be of use."""
        if prefix.cached >= LEAST:
            self._rows[row] = prefix

    def clear(self) -> None:
        """Forget all: the weights that computed them are no longer those of the model."""
        self._rows.clear()

    def starts(self, prompts: Sequence[Ints], running: Sequence[tuple[int, Prefix]]) -> list[Start]:
        """Where each of `prompts` begins; `running` are prefixes in rows that run. Several may begin from one row.

        A row that is continued from its end is free from here on: the row that continues it holds all of it.
        """
        starts = [self._start(prompt, running) for prompt in prompts]
        for row, common, *_ in starts:
            if row in self._rows:
                prefix = self._rows.pop(row)
                if common < prefix.cached:
                    self._rows[row] = prefix
        return starts

    def make_room(self, first: int, end: int, capacity: int) -> list[tuple[int, int, int]]:
        """Leave rows `first` to `end - 1` without prefixes; the least recently used ones go if there is no room.

        Returns the rows that are to be copied: from where, to where, and how many tokens.
        """
        while len(self._rows) > capacity - end:
            del self._rows[next(iter(self._rows))]
        inside = [row for row in self._rows if first <= row < end]
        moves = dict(zip(inside, (row for row in range(end, capacity) if row not in self._rows), strict=False))
        self._rows = {moves.get(row, row): prefix for row, prefix in self._rows.items()}
        return [(row, target, self._rows[target].cached) for row, target in moves.items()]

    def _start(self, prompt: Ints, running: Sequence[tuple[int, Prefix]]) -> Start:
        best = Start(-1, 0, len(prompt))
        for row, prefix in chain(self._rows.items(), running):
            if (common := prefix.common(prompt)) > best.common:
                best = Start(row, common, prefix.root, prefix.computed[:common])
        return best
