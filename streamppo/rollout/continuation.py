"""Replays a recorded completion up to one of its tokens, and samples the remainder.

    recorded     prompt | turn 0 | observation | turn 1 | ...
    from token `at`, which is in turn 1

    turn 0       the recorded tokens          the environment repeats its steps up to the recorded state
    turn 1       the tokens before `at`, then sampled ones
    later turns  sampled

A recorded turn is replayed only if its context equals the recorded context.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from streamppo.errors import RunError
from streamppo.rollout import random_numbers
from streamppo.rollout.engine import Completion, Cuts, Sampler, Sampling
from streamppo.types import Flags, Ints


class RecordedCompletion(NamedTuple):
    """A recorded completion of T tokens; `mask` [T] is true for tokens that the policy sampled."""

    prompt_tokens: Ints
    tokens: Ints
    mask: Flags

    @property
    def turns(self) -> list[tuple[int, int]]:
        """The tokens of each turn, as pairs [start, end)."""
        edges = np.flatnonzero(np.diff(self.mask, prepend=False, append=False))
        return [(int(start), int(end)) for start, end in pairwise(edges) if self.mask[start]]


class Continuation:
    """The sampler of one episode: repeats the recorded tokens before token `at`, and samples from token `at` on."""

    def __init__(
        self, engine: Sampler, recorded: RecordedCompletion, at: int, completes: Callable[[Ints], bool] | None = None
    ) -> None:
        self._engine, self._recorded, self._at, self._completes = engine, recorded, at, completes
        self._turns = iter(recorded.turns)
        self.has_begun = False

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        """See `Engine.generate`. Raises `RunError` if the recorded turn follows another context than `prompt`."""
        if self.has_begun:
            return await self._engine.generate(prompt, sampling, cuts)
        start, end = next(self._turns)
        recorded = self._recorded
        if not np.array_equal(prompt, np.concatenate([recorded.prompt_tokens, recorded.tokens[:start]])):
            raise RunError(
                f"the context of token {start} is not the recorded one: the data, the chat template or the environment "
                "has changed, so the completion cannot be continued from there"
            )
        if end <= self._at:
            return _as_recorded(recorded.tokens[start:end])
        self.has_begun = True
        before = recorded.tokens[start : self._at]
        if len(before) >= sampling.max_tokens:
            raise RunError(f"a turn has at most {sampling.max_tokens} tokens: none is left after token {self._at}")
        seed = random_numbers.seed_after(sampling.seed, len(before))
        remaining = sampling._replace(max_tokens=sampling.max_tokens - len(before), seed=seed)
        return self._join(before, await self._engine.generate(np.concatenate([prompt, before]), remaining, cuts))

    def _join(self, before: Ints, remainder: Completion) -> Completion:
        """Join the recorded tokens `before` of a turn and its sampled rest; a stop string may begin in `before`."""
        tokens, finish = np.concatenate([before, remainder.tokens]), remainder.finish
        if self._completes is not None and len(before):
            ends = (count for count in range(len(before) + 1, len(tokens)) if self._completes(tokens[:count]))
            if end := next(ends, 0):
                tokens, finish = tokens[:end], "stop"
            elif self._completes(tokens):
                finish = "stop"
        recorded, num_sampled = _as_recorded(before), len(tokens) - len(before)
        return Completion(
            tokens,
            np.concatenate([recorded.logprobs, remainder.logprobs[:num_sampled]]),
            np.concatenate([recorded.versions, remainder.versions[:num_sampled]]),
            finish,
        )


def _as_recorded(tokens: Ints) -> Completion:
    return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")
