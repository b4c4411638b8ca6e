"""Completions with segments: reads their tokens as SGLang streams them, and cuts them.

SGLang sends the first token at once, and then `INTERVAL` tokens at a time. SGLang reports the version of each token
only at the end of the completion. Until then:

    pause      at most INTERVAL sampled tokens have not arrived: INTERVAL - 1, and one of the step under way
    version    tokens that may be among these get the version before the swap, so that no lag is understated
    cut        comes after these tokens; a swap ends when all due segments have been cut
    end        the versions of written segments are compared with SGLang's own versions

If tokens pass through SGLang's detokenizer or a server, the answer to a pause may overtake them. The first token of the
new version is then recorded later, when the loaded weights are verified.
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
from streamppo.rollout.sglang.link import Answer
from streamppo.rollout.sglang.wire import SampledPart
from streamppo.types import Ints

INTERVAL = 8
"""Tokens per message of a stream: each message costs CPU, and a swap with a due cut waits for this many decode
steps."""


class CompletionStream:
    """One running completion, requested at `version`. Of `length` arrived tokens, `handed` are in written segments."""

    def __init__(self, cuts: Cuts, version: int, certain: asyncio.Event, *, candidates: bool) -> None:
        self.cuts, self.length, self.handed, self.cached = cuts, 0, 0, 0
        self._certain, self._candidates = certain, candidates
        self._arrived: list[SampledPart] = []
        self._version_starts: list[tuple[int, int]] = [(0, version)]
        self._handed_versions = np.zeros(0, np.int32)
        self._due: asyncio.Future[None] | None = None
        self._last: Answer = None

    async def read(self, answers: AsyncGenerator[Answer]) -> None:
        """Read all answers and cut due segments meanwhile. Raises `ModelError` if the stream breaks off."""
        async with aclosing(answers):
            async for answer in answers:
                self._add(answer["meta_info"])
        if self._last is None:
            raise ModelError("SGLang gave up a completion: its stream broke off")

    def note_version(self, version: int, *, late: bool = False) -> None:
        """Record the first token certainly sampled with the present `version`; `late` replaces a record."""
        earlier = [start for start in self._version_starts if start[1] != version]
        self._version_starts = [*earlier, (self.length + INTERVAL if self.length or late else 1, version)]

    def oldest(self) -> int | None:
        """Return the oldest version of tokens outside written segments; None without such tokens, or after the end."""
        if self.length == self.handed or self._last is not None:
            return None
        return self.cuts.oldest_after(self.handed, int(self._versions()[self.handed]))

    def cut_before_swap(self) -> "asyncio.Future[None]":
        """Cut after the last token that older weights may have sampled. The returned future is done after the cut."""
        due = self._due = asyncio.get_running_loop().create_future()
        self.cut_due()
        return due

    def cut_due(self) -> None:
        """Write the due segments, unless it is uncertain which weights sampled them."""
        # At least the last token must stay outside the segments.
        while self._certain.is_set() and (at := self._next_cut()) <= self.length - (self._last is not None):
            self._write_cut(at)
        if self._due and self.handed >= self._version_starts[-1][0]:
            self.close()

    def close(self) -> None:
        """End the wait for a due cut, because it was made, or the completion has ended or failed."""
        if self._due and not self._due.done():
            self._due.set_result(None)
        self._due = None

    def completion(self, kv: Literal["keep", "recompute"]) -> Completion:
        """Return the whole completion. Raises `ModelError` if a token in a segment is older than the segment states."""
        complete = wire.complete(self._concatenate(), self._last, self._version_starts[0][1], kv)
        handed_versions = complete.versions[: self.handed]
        if (handed_versions < self._handed_versions).any():
            raise ModelError(
                f"SGLang reports versions {handed_versions.tolist()} for tokens that were handed over with versions "
                f"{self._handed_versions.tolist()}"
            )
        return complete

    def _add(self, meta: Answer) -> None:
        self._arrived.append(
            wire.read_sampled(meta, meta["completion_tokens"] - self.length, candidates=self._candidates)
        )
        self.length, self.cached = meta["completion_tokens"], meta.get("cached_tokens") or 0
        if meta.get("finish_reason"):
            self._last = meta
        self.cut_due()

    def _next_cut(self) -> int:
        """Return the number of tokens at which the next segment ends; beyond all tokens if no cut is due."""
        begin, by_length = self._version_starts[-1][0], self.cuts.next_by_length(self.handed)
        return min(by_length, begin) if self._due and self.handed < begin else by_length

    def _write_cut(self, at: int) -> None:
        joined, versions = self._concatenate(), self._versions()[:at]
        candidates = None if joined.candidates is None else joined.candidates.first(at)
        self.handed, self._handed_versions = at, versions
        part = Completion(joined.tokens[:at], joined.logprobs[:at], versions, "cut", candidates=candidates)
        self.cuts.take(part._replace(cached=self.cached))

    def _concatenate(self) -> SampledPart:
        self._arrived = [wire.concatenate(self._arrived)]
        return self._arrived[0]

    def _versions(self) -> Ints:
        versions = np.zeros(self.length, np.int32)
        for begin, version in self._version_starts:
            versions[begin:] = version
        return versions


class CompletionStreams:
    """The streams of one engine; `certain` is set while it is certain which weights SGLang holds."""

    def __init__(self, certain: asyncio.Event) -> None:
        self._certain = certain
        self._open: dict[CompletionStream, None] = {}

    @contextmanager
    def open(self, cuts: Cuts, version: int, *, candidates: bool) -> Iterator[CompletionStream]:
        stream = CompletionStream(cuts, version, self._certain, candidates=candidates)
        self._open[stream] = None
        try:
            yield stream
        finally:
            del self._open[stream]
            stream.close()

    def note_version(self, version: int, *, late: bool = False) -> None:
        for stream in self._open:
            stream.note_version(version, late=late)

    async def cut(self, version: int) -> None:
        """Cut the segments due at `version`, which SGLang certainly holds; return when all are written."""
        streams = [(stream, stream.oldest()) for stream in self._open if stream.cuts.max_age]
        by_age = [(stream, oldest) for stream, oldest in streams if oldest is not None]
        due = rules.segments_to_cut(version, [(stream.cuts, oldest) for stream, oldest in by_age])
        cuts = [by_age[index][0].cut_before_swap() for index in due]
        for stream in list(self._open):
            stream.cut_due()
        if cuts:
            await asyncio.wait(cuts)
