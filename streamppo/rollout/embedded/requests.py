"""The embedded engine's requests: a running completion, and its end tokens."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streamppo.rollout.embedded.prefixes import NONE
from streamppo.rollout.engine import NEVER, Completion, Cuts, Sampling
from streamppo.types import Ints


class EndTokens(NamedTuple):
    """Token `ids` and stop strings (the test `completes`) end completions; `unknown` ids are never sampled."""

    ids: Collection[int] = ()
    completes: Callable[[Ints], bool] | None = None
    unknown: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One completion under way, of at most `limit` tokens.

    With top-p or top-k, `candidates` has an array for every token; an empty array stands for the whole vocabulary.
    The first `handed` tokens are in segments. `segment` is the newest segment, until it is handed over. If the engine
    keeps turns, `computed` has the version whose weights computed each prompt token, and the first `cached` tokens of
    the prompt were already in the cache.
    """

    prompt: Ints
    sampling: Sampling
    limit: int
    done: asyncio.Future[Completion]
    cuts: Cuts | None = None
    candidates: list[Ints] = field(default_factory=list)
    completion: Completion | None = None
    handed: int = 0
    segment: Completion | None = None
    computed: Ints = field(default_factory=lambda: NONE)
    cached: int = 0

    def next_cut(self) -> int:
        return self.cuts.next_by_length(self.handed) if self.cuts else NEVER

    def resolve(self) -> None:
        if not self.done.done():
            assert self.completion is not None
            self.done.set_result(self.completion)
