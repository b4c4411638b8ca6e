"""Maps positions in an endless stream to rows and sources, as pure functions of seed and position."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from zlib import crc32

import numpy as np

from streamppo.types import WireStruct

BLOCK = 1024
"""Positions over which a mixture matches its weights exactly."""
EASIEST = 0.1
"""Share of the rows at the start of a ramp."""


class ShuffledOrder:
    """Row `permutation(seed, epoch)[position % n]` with epoch = position // n; `count` is n, `key` begins with seed."""

    def __init__(self, count: int, *key: int) -> None:
        # Trajectories in flight may belong to two consecutive epochs.
        self._permutation = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((key[0], epoch, *key[1:])).permutation(count)
        )
        self.count, self.key = count, key

    def __call__(self, position: int) -> int:
        """Return the row at `position` >= 0."""
        epoch, within = divmod(position, self.count)
        return int(self._permutation(epoch)[within])


class RampedOrder:
    """A curriculum: over the first `ramp` positions rows are drawn from a growing set of the easiest; then shuffled.

    eligible = round(n * (EASIEST + (1 - EASIEST) * position / ramp)) easiest of n rows
    """

    def __init__(self, difficulty: Sequence[int], ramp: int, seed: int) -> None:
        self._by_difficulty = np.argsort(np.asarray(difficulty), kind="stable")
        self._ramp = ramp
        self._seed = seed
        self._after = ShuffledOrder(len(difficulty), seed)

    def __call__(self, position: int) -> int:
        """Return the row at `position` >= 0."""
        if position >= self._ramp:
            return self._after(position - self._ramp)
        count = len(self._by_difficulty)
        eligible = max(1, round(count * (EASIEST + (1 - EASIEST) * position / self._ramp)))
        drawn = np.random.default_rng((self._seed, 0x4A3B, position)).integers(eligible)
        return int(self._by_difficulty[drawn])


class Mixture:
    """Mixes sources in proportion to their weights, exact to 1 / `BLOCK` in every block, in a seeded order."""

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
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

    def __call__(self, position: int) -> tuple[int, int]:
        """Return (index of the source, position in its own stream)."""
        block, within = divmod(position, self._size)
        sources, ranks = self._block(block)
        source = int(sources[within])
        return source, block * self._counts[source] + int(ranks[within])

    def _arrange(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """One block: the source of each position, and the count of the same source before it in the block."""
        sources = generator.permutation(np.repeat(np.arange(len(self._counts)), self._counts))
        ranks = np.empty(self._size, dtype=np.int64)
        for source, count in enumerate(self._counts):
            ranks[sources == source] = np.arange(count)
        return sources, ranks


class PromptOrder:
    """Maps the number of a prompt to its source and row. `orders` are of the sources, named and mixed by `weights`."""

    def __init__(self, orders: Sequence[Callable[[int], int]], weights: Mapping[str, float], seed: int) -> None:
        self._orders = orders
        self._mixture = Mixture(weights, seed) if len(orders) > 1 else None

    def __call__(self, number: int) -> tuple[int, int]:
        """Return (index of the source, row of its training rows) of prompt `number` >= 0."""
        source, position = self._mixture(number) if self._mixture else (0, number)
        return source, self._orders[source](position)


class SourceRows(WireStruct, frozen=True):
    """One source of shuffled prompts: its name and weight, the number of its training rows, the key of its order.

    `content` is a CRC of the rows' prompts.
    """

    name: str
    weight: float
    count: int
    key: tuple[int, ...]
    content: int = 0


class RowNumbers(WireStruct, frozen=True):
    """Finds the row number of a prompt without the rows: has the sources and the seed of their mixture.

    Example: sources of 10 and 5 rows. Row 2 of the second source has number 12.
    """

    sources: tuple[SourceRows, ...]
    seed: int

    def has_rows_of(self, other: "RowNumbers") -> bool:
        """Return True if a row's number stands for the same row in `other`, whatever the order of prompts."""
        return [(source.name, source.count, source.content) for source in self.sources] == [
            (source.name, source.count, source.content) for source in other.sources
        ]

    def of_prompts(self) -> Callable[[int], int]:
        """Return the function from a prompt's number to its row's number among the rows of all sources."""
        orders = [ShuffledOrder(source.count, *source.key) for source in self.sources]
        place = PromptOrder(orders, {source.name: source.weight for source in self.sources}, self.seed)
        firsts = np.cumsum([0, *(source.count for source in self.sources)]).tolist()

        def number(prompt: int) -> int:
            source, row = place(prompt)
            return firsts[source] + row

        return number
