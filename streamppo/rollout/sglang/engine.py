"""SGLang behind the `Engine` protocol: processes started by the rollout actor, or a running server.

    consumes     requests, at most as many at a time as SGLang runs concurrently; weights
    produces     completions, in the order of their ends
    waits for    requests and weights; between a death and the next start, for SGLang
    unblocks     the callers of `generate` and `update_weights`

    swap     check names and shapes -> swap (session.py) -> write the due segments (stream.py)
    death    restart SGLang with the served version -> resend every request in flight

If a swap fails after names and shapes were checked, SGLang is ended, and restarted with the previous version. No
segment or completion is returned while it is unknown which weights sampled it. If SGLang dies, a completion with a
written segment fails unless it is `restartable`, because its remainder cannot be sampled again.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeAlias, TypeVar

from torch import Tensor

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.engine import Completion, Cuts, Sampling, Usage
from streamppo.rollout.sglang import session as sessions
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.copies import VersionCopies
from streamppo.rollout.sglang.link import HEALTH_S, Link
from streamppo.rollout.sglang.session import EngineSession, SessionSetup
from streamppo.rollout.sglang.stream import INTERVAL, CompletionStreams
from streamppo.rollout.weight_checks import Architecture, check_fit, check_prompt
from streamppo.types import Ints
from streamppo.weights import shared_memory

DEATHS = 3
"""A request fails when SGLang has died, or the connection has broken, this many times during the request."""
T = TypeVar("T")
Fields: TypeAlias = Mapping[str, object]
log = logging.getLogger(__name__)


class SGLangDied(Exception):
    """SGLang died during this call, or the connection broke; the message is the reason."""


async def start(
    setup: SessionSetup, architecture: Architecture, version: int, tensors: Mapping[str, Tensor]
) -> "SGLangEngine":
    """Start SGLang with `tensors` as `version`. Raises `ModelError` or `WeightsError`."""
    copies = VersionCopies(setup.bucket_bytes, shared=setup.shared)
    check_fit(architecture.shapes, tensors)
    saved = await asyncio.to_thread(_copy_as_files, architecture, copies, tensors)
    session = await sessions.start(setup, 0, version, saved)
    copies.serve()
    return SGLangEngine(setup, session, (architecture, copies, saved), version)


class SGLangEngine:
    """Implements `Engine`; made by `start`. SGLang holds the tensors of `served`, named as in files, as `version`."""

    def __init__(
        self,
        setup: SessionSetup,
        session: EngineSession,
        served: tuple[Architecture, VersionCopies, Mapping[str, Tensor]],
        version: int,
    ) -> None:
        self._setup, self._session = setup, session
        self._architecture, self._copies, self._tensors = served
        self._version = self._loaded_version = version
        self._eos_ids, self._longest = sorted(setup.eos_ids), setup.context - 1
        self._biases = wire.biases(setup.unknown)
        self._capacity = asyncio.Semaphore(session.link.capacity)
        self._run = uuid.uuid4().hex[:8]
        self._swapping, self._copying = asyncio.Lock(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")
        self._serving, self._certain = asyncio.Event(), asyncio.Event()
        self._serving.set()
        self._certain.set()
        self._streams = CompletionStreams(self._certain)
        self._cancel_calls: set[Callable[[], bool]] = set()
        self._tokens = self._swaps = self._in_flight = self._requests = self._restarts = 0
        self._prompted = self._reused = 0
        self._busy_s = self._swap_s = 0.0
        self._begin = self._since = time.perf_counter()
        self._watch = asyncio.create_task(self._keep_alive())

    @property
    def version(self) -> int:
        """See `Engine.version`. A swap changes the version after all due segments are written."""
        return self._version

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        """See `Engine.generate`. If SGLang dies, the completion is sampled again from its beginning."""
        check_prompt(prompt, self._longest, self._setup.vocabulary)
        async with self._capacity:
            self._count(+1)
            try:
                return await self._generate_with_restart(prompt, sampling, cuts)
            finally:
                self._count(-1)

    async def update_weights(
        self, version: int, tensors: Mapping[str, Tensor], contents: Mapping[str, int] | None = None
    ) -> None:
        check_fit(self._architecture.shapes, tensors)
        async with self._swapping:
            # One thread for all copies: a cancelled swap continues to write, and the next one writes to the same
            # memory.
            copied = self._copying.submit(_copy_as_files, self._architecture, self._copies, tensors, contents)
            saved = await asyncio.wrap_future(copied)
            await self._until_serving()
            begin = time.perf_counter()
            try:
                await self._until_death(self._session.carrier.stage(saved))
                self._certain.clear()
                await self._until_death(self._session.swap(version, saved, self._streams.note_version))
                if not self._session.link.is_ordered:
                    self._streams.note_version(version, late=True)
            except SGLangDied as died:
                raise WeightsError(f"SGLang died while it loaded version {version} ({died})") from None
            except (ValueError, WeightsError) as refused:
                self._end_session(f"it refused version {version}")
                raise WeightsError(f"version {version}: {refused}") from refused
            self._loaded_version, self._tensors = version, saved
            self._copies.serve()
            self._certain.set()
            self._swaps += 1
            self._swap_s += time.perf_counter() - begin
            await self._streams.cut(version)
            self._version = version

    def usage(self) -> Usage:
        self._count(0)
        idle_s = time.perf_counter() - self._begin - self._busy_s
        counts = (self._swaps, self._swap_s, self._restarts, self._prompted, self._reused)
        # A request's key names a version, so SGLang reuses only cache entries of age 0. With kv = "keep", however,
        # requests that wait during a swap reuse entries of the previous version, also counted with age 0.
        ages = {0: self._reused} if self._reused else {}
        return Usage(self._tokens, self._busy_s, idle_s, *counts, ages, is_starting=not self._serving.is_set())

    async def stop(self) -> None:
        self._watch.cancel()
        await asyncio.wait([self._watch])
        for cancel in list(self._cancel_calls):
            cancel()
        await self._session.stop()
        self._copying.shutdown(cancel_futures=True)

    async def _keep_alive(self) -> None:
        while True:
            session = self._session
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_S):
                    await asyncio.shield(session.end)
            if not session.end.done() and (reason := await session.link.death()):
                self._end_session(reason)
            if session.end.done():
                log.info("SGLang ended: %s; its next start gets version %d", session.end.result(), self._loaded_version)
                await session.stop()
                self._restarts += 1
                self._session = await sessions.start(self._setup, self._restarts, self._loaded_version, self._tensors)
                self._serving.set()
                self._certain.set()

    def _end_session(self, reason: str) -> None:
        self._serving.clear()
        self._certain.clear()
        if not self._session.end.done():
            self._session.end.set_result(reason)

    async def _until_death(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises `SGLangDied`, and cancels `work`, if SGLang dies first."""
        end = self._session.end
        call = asyncio.ensure_future(work)
        self._cancel_calls.add(call.cancel)
        try:
            await asyncio.wait([call, end], return_when=asyncio.FIRST_COMPLETED)
            if not end.done():
                return await call
        except ConnectionError as error:
            self._end_session(str(error))
        finally:
            call.cancel()
            self._cancel_calls.discard(call.cancel)
        raise SGLangDied(end.result())

    async def _until_answer(self, work: Awaitable[T]) -> T:
        """Like `_until_death`, for one request. If only its own connection broke, the other requests continue."""
        session = self._session

        async def answer() -> T:
            try:
                return await work
            except ConnectionError as broken:
                if await session.link.death():
                    raise
                log.info("a request is sent again: %s", broken)
                raise SGLangDied(str(broken)) from broken

        return await self._until_death(answer())

    async def _until_serving(self) -> None:
        if self._serving.is_set() and self._certain.is_set():
            return
        ready = asyncio.ensure_future(self._ready())
        try:
            await asyncio.wait([ready, self._watch], return_when=asyncio.FIRST_COMPLETED)
            if self._watch.done():
                self._watch.result()
        finally:
            ready.cancel()

    async def _ready(self) -> None:
        await self._serving.wait()
        await self._certain.wait()

    async def _generate_with_restart(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None) -> Completion:
        for _ in range(DEATHS):
            await self._until_serving()
            with suppress(SGLangDied):
                return await self._sample(prompt, sampling, cuts)
        raise ModelError(f"SGLang died or disconnected {DEATHS} times during one prompt of {len(prompt)} tokens")

    async def _sample(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None) -> Completion:
        self._requests += 1
        if self._setup.routes:
            # Streams carry no routes, so the completion is requested in one piece.
            cuts = None
        link, rid = self._session.link, f"{self._run}-{self._requests}"
        fields = wire.request(
            prompt,
            sampling,
            room=self._longest + 1 - len(prompt),
            eos_ids=self._eos_ids,
            strings=self._setup.strings,
            biases=self._biases,
            rid=rid,
            # The key prevents reuse of cache entries of other weights: of older versions, or of a failed push.
            key=f"{self._run}-{self._restarts}-{self._loaded_version}",
            interval=INTERVAL if cuts else 0,
            routes=self._setup.routes,
        )
        sample = partial(self._generate_in_segments, cuts) if cuts else self._generate_whole
        try:
            return await sample(len(prompt), link, fields, candidates=sampling.excludes_tokens)
        except asyncio.CancelledError:
            with suppress(ConnectionError):
                await link.abort(rid)
            raise
        except ValueError as refused:
            raise ModelError(f"SGLang refuses a prompt of {len(prompt)} tokens: {refused}") from refused

    async def _generate_whole(self, prompted: int, link: Link, fields: Fields, *, candidates: bool) -> Completion:
        version, routed = self._loaded_version, prompted if self._setup.routes else 0
        answer = await self._until_answer(link.call("generate", **fields))
        await self._until_death(self._certain.wait())
        completion = wire.completion(answer, version, candidates=candidates, kv=self._setup.kv, routed=routed)
        self._count_tokens(prompted, completion.cached, len(completion.tokens))
        return completion

    async def _generate_in_segments(
        self, cuts: Cuts, prompted: int, link: Link, fields: Fields, *, candidates: bool
    ) -> Completion:
        with self._streams.open(cuts, self._loaded_version, candidates=candidates) as stream:
            try:
                await self._until_answer(stream.read(link.stream(**fields)))
                await self._until_death(self._certain.wait())
            except SGLangDied as died:
                if stream.handed and not cuts.restartable:
                    raise ModelError(f"SGLang died after a segment that was handed over: {died}") from died
                raise
            finally:
                # Of a cancelled stream, only the tokens that have arrived are known.
                self._count_tokens(prompted if stream.length else 0, stream.cached, stream.length)
        return stream.completion(self._setup.kv)

    def _count_tokens(self, prompted: int, cached: int, sampled: int) -> None:
        self._tokens += sampled
        self._prompted += prompted
        self._reused += min(cached, prompted)

    def _count(self, change: int) -> None:
        now = time.perf_counter()
        if self._in_flight:
            self._busy_s += now - self._since
        self._since = now
        self._in_flight += change


def _copy_as_files(
    architecture: Architecture,
    copies: VersionCopies,
    tensors: Mapping[str, Tensor],
    contents: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """Copy `tensors`, named and split as in the model's files, into `copies`, unless they are in shared memory.

    Tensors in shared memory were checked and do not change; others may change. Raises `WeightsError` as `copy` does.
    """
    if shared_memory.is_shared(tensors.values()):
        return architecture.as_saved(tensors)
    return architecture.as_saved(copies.copy(tensors, contents))
