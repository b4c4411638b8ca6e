"""Maps positions in an endless stream of prompts to sources and rows, as pure functions of seed and position."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from zlib import crc32

import numpy as np

from streamppo.types import WireStruct

BLOCK = 1024
"""Length of the blocks of a mixture. In every block the sources occur in proportion to their weights."""


class ShuffledOrder:
    """Maps a position to row `permutation(epoch)[position % count]`, epoch = position // count. `key[0]` is a seed."""

    def __init__(self, count: int, *key: int) -> None:
        # Keep two permutations, because the prompts in flight may belong to two consecutive epochs.
        self._permutation = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((key[0], epoch, *key[1:])).permutation(count)
        )
        self.count, self.key = count, key

    def __call__(self, position: int) -> int:
        epoch, within = divmod(position, self.count)
        return int(self._permutation(epoch)[within])


class PromptOrder:
    """Maps the number of a prompt to its source and row. Every block mixes sources by `weights` in a seeded order."""

    def __init__(self, orders: Sequence[Callable[[int], int]], weights: Mapping[str, float], seed: int) -> None:
        self._orders = orders
        total = sum(weights.values())
        exact = {name: BLOCK * weight / total for name, weight in weights.items()}
        counts = {name: max(1, int(share)) for name, share in exact.items()}
        spare = max(0, BLOCK - sum(counts.values()))
        for name in sorted(exact, key=lambda name: counts[name] - exact[name])[:spare]:
            counts[name] += 1
        self._counts = list(counts.values())
        self._size = sum(self._counts)
        key = crc32("/".join(weights).encode())
        self._block = lru_cache(maxsize=2)(lambda number: self._arrange(np.random.default_rng((seed, number, key))))

    def __call__(self, number: int) -> tuple[int, int]:
        """Return (index of the source, index among the training rows of the source) of prompt `number` >= 0."""
        block, within = divmod(number, self._size)
        sources, ranks = self._block(block)
        source = int(sources[within])
        return source, self._orders[source](block * self._counts[source] + int(ranks[within]))

    def _arrange(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position in a block, and how often the source occurs before that position."""
        sources = generator.permutation(np.repeat(np.arange(len(self._counts)), self._counts))
        ranks = np.empty(self._size, dtype=np.int64)
        for source, count in enumerate(self._counts):
            ranks[sources == source] = np.arange(count)
        return sources, ranks


class SourceRows(WireStruct, frozen=True):
    """One source of shuffled prompts. `key` is the key of its `ShuffledOrder`, `content` a CRC of the rows' texts."""

    name: str
    weight: float
    count: int
    key: tuple[int, ...]
    content: int = 0


class RowNumbers(WireStruct, frozen=True):
    """Finds the row number of a prompt without the rows: row 2 of source 2 is number 12 if source 1 has 10 rows."""

    sources: tuple[SourceRows, ...]
    seed: int

    def has_rows_of(self, other: "RowNumbers") -> bool:
        """Return True if every row number means the same row in `other`; the order of prompts may differ."""
        return [(source.name, source.count, source.content) for source in self.sources] == [
            (source.name, source.count, source.content) for source in other.sources
        ]

    def of_prompts(self) -> Callable[[int], int]:
        """Return the function from the number of a prompt to the number of its row."""
        orders = [ShuffledOrder(source.count, *source.key) for source in self.sources]
        place = PromptOrder(orders, {source.name: source.weight for source in self.sources}, self.seed)
        firsts = np.cumsum([0, *(source.count for source in self.sources)]).tolist()

        def number(prompt: int) -> int:
            source, row = place(prompt)
            return firsts[source] + row

        return number
