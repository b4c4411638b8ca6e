"""The completions that hand over segments: their tokens as SGLang sends them, and their cuts.

SGLang sends the first token at once, and then `INTERVAL` tokens at a time. Only at the end it says which version
sampled each of them. Until then:

    a pause      INTERVAL tokens at most are sampled and have not arrived: INTERVAL - 1, and that of the step under way
    a version    is that before the swap for every token that can be one of them: no token counts as too young
    a cut        stands behind them; a swap ends when all segments that are due have been cut
    the end      the versions that were handed over are compared with SGLang's own word

So a cut touches nothing in SGLang, and the completion goes on with the same cache.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Literal

import numpy as np

from streamppo.errors import ModelError
from streamppo.rollout import segment_cuts as rules
from streamppo.rollout.engine import Completion, Cuts
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.client import Answer
from streamppo.rollout.sglang.wire import SampledPart
from streamppo.types import Ints

INTERVAL = 8
"""Tokens that SGLang sends at a time: each message costs CPU, and a swap waits for so many steps where a cut is due."""


class CompletionStream:
    """One completion under way, sent to an SGLang that held `version`; with `candidates`, top-p or top-k are on.

    `length` tokens have arrived, of which `handed` are in segments.
    """

    def __init__(self, cuts: Cuts, version: int, certain: asyncio.Event, *, candidates: bool) -> None:
        self.cuts, self.length, self.handed = cuts, 0, 0
        self._certain, self._candidates = certain, candidates
        self._arrived: list[SampledPart] = []
        self._begins: list[tuple[int, int]] = [(0, version)]
        self._handed_versions = np.zeros(0, np.int32)
        self._due: asyncio.Future[None] | None = None
        self._last: Answer = None

    async def read(self, answers: AsyncGenerator[Answer]) -> None:
        """Take all answers, and cut on the way. Raises `ModelError` if they are no completion."""
        async with aclosing(answers):
            async for answer in answers:
                self._add(answer["meta_info"])
        if self._last is None:
            raise ModelError("SGLang gave up a completion: its stream broke off")

    def loaded(self, version: int) -> None:
        """SGLang is paused and holds `version`: note the first token that is surely sampled with it."""
        self._begins.append((self.length + INTERVAL if self.length else 1, version))

    def oldest(self) -> int | None:
        """The version of the oldest token that was not handed over; None if none has arrived, or all have."""
        if self.length == self.handed or self._last is not None:
            return None
        return self.cuts.oldest_behind(self.handed, int(self._versions()[self.handed]))

    def cut_before_swap(self) -> "asyncio.Future[None]":
        """Cut behind the tokens that older weights can have sampled, once they have arrived; done when it is."""
        due = self._due = asyncio.get_running_loop().create_future()
        self.cut_what_is_due()
        return due

    def cut_what_is_due(self) -> None:
        """Hand over the segments that are due, unless it is in doubt which weights sampled them."""
        # The last token is never handed over: the completion has it.
        while self._certain.is_set() and (at := self._next_cut()) <= self.length - (self._last is not None):
            self._write_cut(at)
        if self._due and self.handed >= self._begins[-1][0]:
            self._settle()

    def close(self) -> None:
        """The completion has come to its end, one way or the other: nothing is cut any more."""
        self._settle()

    def completion(self, kv: Literal["keep", "recompute"]) -> Completion:
        """Read the whole completion. Raises `ModelError` if a token that was handed over is older than was said."""
        whole = wire.complete(self._concatenate(), self._last, self._begins[0][1], kv)
        if not whole.versions_known:
            whole = whole._replace(versions=self._versions())
        known = whole.versions[: self.handed]
        if (known < self._handed_versions).any():
            raise ModelError(
                f"SGLang has sampled tokens with versions {known.tolist()} that were handed over as of "
                f"{self._handed_versions.tolist()}"
            )
        return whole

    def _add(self, meta: Answer) -> None:
        self._arrived.append(
            wire.read_sampled(meta, meta["completion_tokens"] - self.length, candidates=self._candidates)
        )
        self.length = meta["completion_tokens"]
        if meta.get("finish_reason"):
            self._last = meta
        self.cut_what_is_due()

    def _next_cut(self) -> int:
        """The number of tokens at which the next segment ends; beyond all tokens if nothing ends it."""
        begin, by_length = self._begins[-1][0], self.cuts.next_by_length(self.handed)
        return min(by_length, begin) if self._due and self.handed < begin else by_length

    def _write_cut(self, at: int) -> None:
        joined, versions = self._concatenate(), self._versions()[:at]
        candidates = None if joined.candidates is None else joined.candidates.first(at)
        self.handed, self._handed_versions = at, versions
        self.cuts.take(Completion(joined.tokens[:at], joined.logprobs[:at], versions, "cut", candidates=candidates))

    def _concatenate(self) -> SampledPart:
        self._arrived = [wire.concatenate(self._arrived)]
        return self._arrived[0]

    def _versions(self) -> Ints:
        versions = np.zeros(self.length, np.int32)
        for begin, version in self._begins:
            versions[begin:] = version
        return versions

    def _settle(self) -> None:
        if self._due and not self._due.done():
            self._due.set_result(None)
        self._due = None


class CompletionStreams:
    """The streams of one engine; `certain` is set while its weights are in no doubt."""

    def __init__(self, certain: asyncio.Event) -> None:
        self._certain = certain
        self._open: dict[CompletionStream, None] = {}

    @contextmanager
    def open(self, cuts: Cuts, version: int, *, candidates: bool) -> Iterator[CompletionStream]:
        """Begin a stream, and close it at the end."""
        stream = CompletionStream(cuts, version, self._certain, candidates=candidates)
        self._open[stream] = None
        try:
            yield stream
        finally:
            del self._open[stream]
            stream.close()

    def loaded(self, version: int) -> None:
        """SGLang is paused and holds `version`."""
        for stream in self._open:
            stream.loaded(version)

    async def cut(self, version: int) -> None:
        """Cut what is due at `version`, which SGLang certainly holds; return when all of it was handed over."""
        found = [(stream, stream.oldest()) for stream in self._open if stream.cuts.max_age]
        by_age = [(stream, oldest) for stream, oldest in found if oldest is not None]
        due = rules.segments_to_cut(version, [(stream.cuts, oldest) for stream, oldest in by_age])
        waited = [by_age[place][0].cut_before_swap() for place in due]
        for stream in list(self._open):
            stream.cut_what_is_due()
        if waited:
            await asyncio.wait(waited)
