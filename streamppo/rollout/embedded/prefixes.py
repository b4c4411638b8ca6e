"""Rows of ended completions, whose keys and values stay in the cache for prompts that continue them.

The root of a row is the prompt of its first completion. If a prompt shares more tokens with a row than the row's root,
it continues a completion, and only the prompt's other tokens are prefilled. Samples of one prompt share only their
root, and are prefilled together.

Example: a row with prompt [1, 2] and completion [3, 4] has a root of 2 tokens, and the cache holds [1, 2, 3], because
the last token was never fed. The prompts [1, 2, 3, 4, 5] and [1, 2, 3, 9] are prefilled from the fourth token on. The
prompt [1, 2, 5] is prefilled from its first token on.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from streamppo.types import Ints

LEAST_TOKENS = 32
"""Minimum number of shared tokens that are copied. A small model recomputes fewer tokens faster than it copies them."""
NONE: Ints = np.zeros(0, np.int32)


class Prefix(NamedTuple):
    """A row's `tokens`. The first `root` are its first prompt; the first `cached` were `computed` by these versions."""

    tokens: Ints
    cached: int
    root: int
    computed: Ints

    def common(self, prompt: Ints) -> int:
        """Return the number of cached tokens that `prompt` can reuse, at most all of its tokens except the last."""
        tokens, root = self.tokens, self.root
        # Test two tokens first: most rows differ from the prompt at token 0 or at token `root`.
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
    """The first `common` tokens of a prompt (0: none) are cached in `row`. `root` and `computed` are as in `Prefix`."""

    row: int
    common: int
    root: int
    computed: Ints = NONE


class Prefixes:
    """The prefixes in rows that run no completion, the least recently used first."""

    def __init__(self) -> None:
        self._rows: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: int, prefix: Prefix) -> None:
        """Record that the ended `row` holds `prefix`, if it is at least `LEAST_TOKENS` tokens long."""
        if prefix.cached >= LEAST_TOKENS:
            self._rows[row] = prefix

    def clear(self) -> None:
        self._rows.clear()

    def starts(self, prompts: Sequence[Ints], running: Sequence[tuple[int, Prefix]]) -> list[Start]:
        """Find the longest cached prefix of each prompt, also in running rows. Continued ended rows become free."""
        starts = [self._start(prompt, running) for prompt in prompts]
        for row, common, *_ in starts:
            if row in self._rows:
                prefix = self._rows.pop(row)
                if common < prefix.cached:
                    self._rows[row] = prefix
        return starts

    def make_room(self, first: int, end: int, capacity: int) -> list[tuple[int, int, int]]:
        """Move prefixes out of rows `first` to `end - 1`, or drop them. Returns copies (source, target, tokens)."""
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
