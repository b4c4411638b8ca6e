"""Rows of ended completions whose keys and values stay in the cache, for continuing prompts.

The root of a row is the prompt of its first completion. A prompt that shares tokens with a row beyond its root
continues a completion, and begins from the shared tokens. Samples of one prompt share only their root, and are
prefilled together.

Example: a row of prompt [1, 2], completion [3, 4], has a root of 2 tokens, and the cache holds [1, 2, 3], because the
last token was never fed. The prompt [1, 2, 3, 4, 5] begins from 3 tokens, [1, 2, 3, 9] from 3, and [1, 2, 5] from none.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from streamppo.types import Ints

LEAST_TOKENS = 32
"""Fewer tokens than this are recomputed: on a small model that is faster than a copy."""


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
        """The number of cached tokens from which `prompt` can begin; at least one of its tokens is computed."""
        tokens, root = self.tokens, self.root
        # Most rows differ from most prompts in one of these two tokens.
        if (
            min(len(prompt), len(tokens)) <= max(root, LEAST_TOKENS)
            or prompt[root] != tokens[root]
            or prompt[0] != tokens[0]
        ):
            return 0
        overlap = min(len(prompt), len(tokens))
        differ = np.flatnonzero(prompt[:overlap] != tokens[:overlap])
        common = int(differ[0]) if len(differ) else overlap
        usable = min(common, self.cached, len(prompt) - 1)
        return usable if common > root and usable >= LEAST_TOKENS else 0


class Start(NamedTuple):
    """`common` tokens of a prompt, 0 for none, are in the cache of `row`, whose first prompt had `root` tokens.

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
        """Record that the ended `row` holds `prefix`, if it is at least `LEAST_TOKENS` tokens long."""
        if prefix.cached >= LEAST_TOKENS:
            self._rows[row] = prefix

    def clear(self) -> None:
        """Drop all prefixes: older weights computed them."""
        self._rows.clear()

    def starts(self, prompts: Sequence[Ints], running: Sequence[tuple[int, Prefix]]) -> list[Start]:
        """Find the cached beginning of each prompt; `running` are prefixes in running rows. Prompts may share a row.

        A row that is continued from its end becomes free: the continuing row has all its tokens.
        """
        starts = [self._start(prompt, running) for prompt in prompts]
        for row, common, *_ in starts:
            if row in self._rows:
                prefix = self._rows.pop(row)
                if common < prefix.cached:
                    self._rows[row] = prefix
        return starts

    def make_room(self, first: int, end: int, capacity: int) -> list[tuple[int, int, int]]:
        """Free rows `first` to `end - 1` of prefixes; without room the least recently used ones are dropped.

        Returns the copies to make: source row, target row, number of tokens.
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
