"""The interface of every engine: token ids go in, tokens with log-probs and versions come out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from streamppo.config.rollout import excludes_tokens
from streamppo.types import Floats, Ints, Routes


class Sampling(NamedTuple):
    """Sampling parameters of one completion. `temperature = 0` is greedy. `top_k = 0` and `top_p = 1` exclude no token.

    Completions with the same `seed` have the same random numbers (random_numbers.py).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    @property
    def excludes_tokens(self) -> bool:
        return excludes_tokens(self.top_p, self.top_k)

    @property
    def greedy(self) -> "Sampling":
        """The same limits for greedy sampling, with all tokens of the vocabulary."""
        return self._replace(temperature=0.0, top_p=1.0, top_k=0)


class TokenCandidates(NamedTuple):
    """The candidates of each of T sampled tokens.

    `tokens` has the candidates of token 0 in rising order, then those of token 1, ...; `counts` [T] are their numbers
    (0: the whole vocabulary).
    """

    tokens: Ints
    counts: Ints

    def first(self, count: int) -> "TokenCandidates":
        return TokenCandidates(self.tokens[: self.counts[:count].sum()], self.counts[:count])

    def drop_first(self, count: int) -> "TokenCandidates":
        return TokenCandidates(self.tokens[self.counts[:count].sum() :], self.counts[count:])

    @classmethod
    def concatenate(cls, parts: "Sequence[TokenCandidates]") -> "TokenCandidates":
        return cls(np.concatenate([part.tokens for part in parts]), np.concatenate([part.counts for part in parts]))


class Completion(NamedTuple):
    """One completion of T >= 1 tokens, including the end-of-sequence token if `finish` is "stop".

    `logprobs[t]` is under the sampling distribution of token t (after temperature, top-k and top-p); greedy tokens have
    their log-prob at temperature 1. `versions[t]` is the weight version that sampled token t. `candidates` is set if
    top-p or top-k may exclude tokens. `routes_SE` are the experts of S tokens, all of prompt and completion except the
    last; None if the engine does not record experts. `cached` is the number of prompt tokens found in the engine's
    cache.
    """

    tokens: Ints
    logprobs: Floats
    versions: Ints
    finish: Literal["stop", "length", "cut"]
    candidates: TokenCandidates | None = None
    routes_SE: Routes | None = None
    cached: int = 0


class ContextReuse:
    """Counts context tokens that earlier turns had computed, and the `reused` ones; ignores contexts below `LEAST`."""

    LEAST = 64

    def __init__(self) -> None:
        self.tokens = self.reused = 0

    def add(self, known: int, cached: int) -> None:
        """Count a turn. Earlier turns had computed `known` tokens of its context; the cache had `cached` of them."""
        if known >= self.LEAST:
            self.tokens, self.reused = self.tokens + known, self.reused + min(known, cached)


NEVER = 2**62


class Cuts(NamedTuple):
    """Where one completion is cut into segments: after every `max_tokens` tokens, and by age (segment_cuts.py).

    A segment is cut at the age of `max_age` versions at the latest. If `max_tokens` or `max_age` is 0, it causes no
    cuts. `take` is called in the engine's event loop with all tokens of the completion so far and `finish` "cut".
    `take` never gets the last token, which only the result of `generate` has. `share` is the number of segments in a
    batch divided by the number of actors. `aim` returns the age from which segments are cut if a batch has room (0:
    never). `oldest` is the oldest version among earlier turns' tokens that are in no segment yet. If `restartable`, the
    engine may sample a completion again from its beginning after `take` got a segment of it.
    """

    take: Callable[[Completion], None]
    max_tokens: int = 0
    max_age: int = 0
    share: float = 0.0
    aim: Callable[[], int] = int
    oldest: int | None = None
    restartable: bool = False

    def next_by_length(self, handed: int) -> int:
        """Return the completion's length at which the segment that begins at token `handed` has `max_tokens` tokens."""
        return handed + self.max_tokens if self.max_tokens else NEVER

    def oldest_after(self, handed: int, version: int) -> int:
        """Return the oldest version in the segment that begins at token `handed`, whose version is `version`."""
        return version if handed or self.oldest is None else self.oldest


class Usage(NamedTuple):
    """Counters since the engine started. `idle_s` is the wall time in which the engine had nothing to decode.

    `restarts` counts restarts of the engine's processes after a death. `prompted` counts prompt tokens, `reused` those
    from the cache, and `kv_ages` the reused ones by age: the engine's version minus the version that computed them.
    `is_starting` is true from a death until the restarted engine has loaded its weights.
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
    is_starting: bool = False


class Sampler(Protocol):
    """Samples completions: an engine, or a wrapper of one."""

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion: ...


class Engine(Sampler, Protocol):
    """Generates in an endless loop; swaps weights between two tokens of running completions.

    consumes     requests by `generate`, weights by `update_weights`
    produces     completions, in the order in which they finish
    waits for    requests only
    unblocks     the caller of `generate` or `update_weights`
    """

    @property
    def version(self) -> int:
        """The version that samples the next token. All segments that are due at this version have been handed over."""
        ...

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        """Sample one completion of `prompt` [P], cut by `cuts`. Raises `PromptRefused`, or `ModelError` if it fails."""
        ...

    async def update_weights(
        self, version: int, tensors: Mapping[str, Tensor], contents: Mapping[str, int] | None = None
    ) -> None:
        """Swap to `tensors` (HF names, hashes `contents`); return when in use. `WeightsError` keeps the old version."""
        ...

    def usage(self) -> Usage: ...

    async def stop(self) -> None:
        """Fail every waiting call with `asyncio.CancelledError` and release everything."""
        ...
