"""The interface of every engine: token ids go in, tokens with log-probs and versions come out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from streamppo.types import Floats, Ints, Routes


class Sampling(NamedTuple):
    """Sampling parameters of one completion. `temperature = 0` is greedy; `top_k = 0` and `top_p = 1` are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def cuts(self) -> bool:
        """True if top-p or top-k leave tokens of the vocabulary out."""
        return self.top_p < 1 or self.top_k > 0


class TokenCandidates(NamedTuple):
    """The tokens that each of T tokens could have been drawn from.

    `tokens` are those of token 0 in rising order, then those of token 1, and so on; `counts` [T] says how many each
    has. A count of 0 stands for the whole vocabulary.
    """

    tokens: Ints
    counts: Ints

    def first(self, count: int) -> "TokenCandidates":
        """Keep those of the first `count` tokens."""
        return TokenCandidates(self.tokens[: self.counts[:count].sum()], self.counts[:count])

    def drop_first(self, count: int) -> "TokenCandidates":
        """Leave out the first `count` tokens."""
        return TokenCandidates(self.tokens[self.counts[:count].sum() :], self.counts[count:])

    @classmethod
    def concatenate(cls, parts: "Sequence[TokenCandidates]") -> "TokenCandidates":
        """Lay those of consecutive tokens end to end."""
        return cls(np.concatenate([one.tokens for one in parts]), np.concatenate([one.counts for one in parts]))


class Completion(NamedTuple):
    """One completion of T >= 1 tokens, the end-of-sequence token included when `finish` is "stop".

    `logprobs[t]` is under the distribution that token t was sampled from (after temperature, top-k and top-p);
    greedy tokens carry their log-prob at temperature 1. `versions[t]` is the weight version that sampled token t. If
    the engine does not know it (`versions_known` is false), it is the oldest version that can have been. `candidates`
    are there exactly if the sampling parameters cut the distribution. `routes_SE` are the experts to which the S tokens
    of prompt and completion but the last were sent, if the engine was asked for them. `cached` tokens of the prompt
    were in the engine's cache.
    """

    tokens: Ints
    logprobs: Floats
    versions: Ints
    finish: Literal["stop", "length", "cut"]
    versions_known: bool = True
    candidates: TokenCandidates | None = None
    routes_SE: Routes | None = None
    cached: int = 0


class ContextReuse:
    """Of contexts that earlier turns of an episode had: their `tokens`, and those of them that were `reused`.

    Contexts of fewer than `LEAST` tokens are left out: engines do not keep them.
    """

    LEAST = 64

    def __init__(self) -> None:
        self.tokens = self.reused = 0

    def add(self, known: int, cached: int) -> None:
        """Count a turn of whose context `known` tokens were there before, and `cached` came from the cache."""
        if known >= self.LEAST:
            self.tokens, self.reused = self.tokens + known, self.reused + min(known, cached)


NEVER = 2**62
"""More tokens than any completion has."""


class Cuts(NamedTuple):
    """One completion is cut after `max_tokens` tokens (0: never), and by its age (`max_age` = 0: never; see cuts.py).

    `take` gets all tokens of the completion so far, with `finish` "cut", in the engine's event loop. `share` are the
    segments of a batch that one engine makes; `aim` gives the age from which they are cut if there is room, 0 for none.
    `oldest` is the version of tokens of earlier calls that were not handed
    over. The last token never is: the completion that `generate` returns has it.
    """

    take: Callable[[Completion], None]
    max_tokens: int = 0
    max_age: int = 0
    share: float = 0.0
    aim: Callable[[], int] = int
    oldest: int | None = None

    def next_by_length(self, handed: int) -> int:
        """The number of tokens at which the segment behind `handed` of them is long enough to be cut."""
        return handed + self.max_tokens if self.max_tokens else NEVER

    def oldest_behind(self, handed: int, version: int) -> int:
        """The version of the oldest token behind `handed` of this call; the first of those is of `version`."""
        return version if handed or self.oldest is None else self.oldest


class Usage(NamedTuple):
    """Counters since the engine started. `idle_s` is the wall time in which it had nothing to decode.

    `restarts` counts how often its processes have died and were started again. Of the `prompted` tokens of prompts
    `reused` came from the cache; `kv_ages` counts them by the versions between the weights that computed them and those
    that sample behind them.
    """

    tokens: int
    busy_s: float
    idle_s: float
    swaps: int
    swap_s: float
    restarts: int = 0
    prompted: int = 0
    reused: int = 0
    kv_ages: Mapping[int, int] = {}


class Engine(Protocol):
    """Generates without end; swaps weights between two tokens while completions are running.

    consumes     requests by `generate`, weights by `update_weights`
    produces     completions, in the order in which they finish
    waits for    requests alone
    unblocks     the caller of `generate` or `update_weights`
    """

    @property
    def version(self) -> int:
        """The version of the weights that the next token will be sampled with.

        The segments that were due at it have been handed over.
        """
        ...

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        """Sample one completion of the token ids `prompt` [P], with segments where `cuts` says.

        Raises `ModelError` if it cannot fit.
        """
        ...

    async def update_weights(
        self, version: int, tensors: Mapping[str, Tensor], contents: Mapping[str, int] | None = None
    ) -> None:
        """Swap to `tensors` (HF names) at the next token boundary; return when they are in use.

        `contents` are the hashes that they should have (weights/content.py), by default those that they have. Raises
        `WeightsError`, and keeps the old version, if names or shapes do not fit, or what the engine would have other
        contents.
        """
        ...

    def usage(self) -> Usage:
        """Counters since the engine started."""
        ...

    async def stop(self) -> None:
        """Fail every waiting call with `asyncio.CancelledError` and release everything."""
        ...
