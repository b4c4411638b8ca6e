"""SGLang behind the `Engine` protocol: its own processes inside the rollout actor, or a server that runs already.

    consumes     requests, as many at a time as SGLang runs at once
    produces     completions, in order of their end
    waits for    requests; between a death and the next start, for SGLang

    swap     check names and shapes -> pause -> load -> continue -> see that the weights have arrived
    death    start again -> load the version that was served -> send what was in flight again

Whatever goes wrong in a swap after its first step ends SGLang, and with it the doubt about its weights: the version
before is loaded into a new one. No completion is handed over while it is not known which weights made it.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar

from torch import Tensor

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.engine import Completion, Sampling, Usage
from streamppo.rollout.fit import check_fit, check_prompt, expected_shapes
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.attest import Attestation
from streamppo.rollout.sglang.link import HEALTH_S, Link
from streamppo.rollout.sglang.push import Carrier
from streamppo.types import Ints

DEATHS = 3
"""A prompt over which SGLang has died so often is not sent again."""
T = TypeVar("T")


class Died(Exception):
    """SGLang died during this call; the message says why."""


class SGLangEngine:
    """See `Engine`. `open` starts it; completions have at most `max_total_tokens` tokens, prompt included."""

    def __init__(
        self,
        link: Link,
        carrier: Carrier,
        hf_config: Any,
        *,
        eos_ids: set[int],
        max_total_tokens: int,
        kv: Literal["keep", "recompute"],
        say: Callable[[str], None],
    ) -> None:
        self._link, self._carrier, self._say = link, carrier, say
        self._shapes = expected_shapes(hf_config)
        self._vocabulary, self._longest = hf_config.vocab_size, max_total_tokens - 1
        self._attestation = Attestation(self._shapes, self._vocabulary)
        self._eos_ids = sorted(eos_ids)
        self._pause = "in_place" if kv == "keep" else "retract"
        self._flush = kv == "recompute"
        self._run = uuid.uuid4().hex[:8]
        self._lives = self._requests = 0
        self._swapping = asyncio.Lock()
        self._serving, self._sure = asyncio.Event(), asyncio.Event()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._tokens = self._swaps = self._in_flight = 0
        self._busy_s = self._swap_s = 0.0
        self._begin = self._since = time.perf_counter()

    async def open(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Start SGLang on `tensors` as `version`. Raises `ModelError` or `WeightsError` if it cannot."""
        check_fit(self._shapes, tensors)
        self._version, self._tensors = version, tensors
        try:
            await self._start()
        except BaseException:
            await self._link.stop()
            raise
        self._capacity = asyncio.Semaphore(self._link.capacity)
        self._begin = self._since = time.perf_counter()
        self._watch = asyncio.create_task(self._keep_alive())

    @property
    def version(self) -> int:
        """The version of the weights that the next token will be sampled with."""
        return self._version

    async def generate(self, prompt: Ints, sampling: Sampling) -> Completion:
        """See `Engine.generate`. What SGLang had begun when it died is sampled from its beginning."""
        check_prompt(prompt, self._longest, self._vocabulary)
        async with self._capacity:
            self._count(+1)
            try:
                return await self._sample_in_spite_of_deaths(prompt, sampling)
            finally:
                self._count(-1)

    async def update_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.update_weights`."""
        check_fit(self._shapes, tensors)
        async with self._swapping:
            await self._until_serving()
            begin = time.perf_counter()
            self._sure.clear()
            try:
                await self._alive(self._load(version, tensors))
                await self._alive(self._attestation.check(self._link, tensors))
            except Died as died:
                raise WeightsError(f"SGLang died while it took version {version} ({died})") from None
            except (ValueError, WeightsError) as refused:
                self._end_life(f"it refused version {version}")
                raise WeightsError(f"version {version}: {refused}") from refused
            self._version, self._tensors = version, tensors
            self._sure.set()
            self._swaps += 1
            self._swap_s += time.perf_counter() - begin

    def usage(self) -> Usage:
        """See `Engine.usage`."""
        self._count(0)
        idle_s = time.perf_counter() - self._begin - self._busy_s
        return Usage(self._tokens, self._busy_s, idle_s, self._swaps, self._swap_s, self._lives - 1)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        for task in list(self._tasks):
            task.cancel()
        await self._link.stop()

    # --- life and death --------------------------------------------------------------------------------------

    async def _start(self) -> None:
        await self._link.start(self._lives)
        self._lives += 1
        self._end = asyncio.get_running_loop().create_future()
        await self._carrier.connect(self._link)
        try:
            await self._load(self._version, self._tensors)
            await self._attestation.begin(self._link, self._tensors)
        except ValueError as refused:
            raise WeightsError(f"version {self._version}: {refused}") from refused
        self._serving.set()
        self._sure.set()

    async def _keep_alive(self) -> None:
        """Look at its health for ever; start it again when it has died. Ends by an exception if that fails."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_S):
                    await asyncio.shield(self._end)
            if not self._end.done() and (why := await self._link.death()):
                self._end_life(why)
            if self._end.done():
                self._say(f"SGLang ended: {self._end.result()}; starting it again with version {self._version}")
                await self._link.stop()
                await self._start()

    def _end_life(self, why: str) -> None:
        self._serving.clear()
        self._sure.clear()
        if not self._end.done():
            self._end.set_result(why)

    async def _alive(self, work: Awaitable[T]) -> T:
        """The result of `work`, which dies with SGLang. Raises `Died`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait([task, self._end], return_when=asyncio.FIRST_COMPLETED)
            if not self._end.done():
                return await task
        except ConnectionError as error:
            self._end_life(str(error))
        finally:
            task.cancel()
        raise Died(self._end.result())

    async def _until_serving(self) -> None:
        """Until SGLang runs and is known to hold `version`. Raises what its last start failed with."""
        assert self._watch is not None, "open comes first"
        if self._serving.is_set() and self._sure.is_set():
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
        await self._sure.wait()

    # --- requests and weights --------------------------------------------------------------------------------

    async def _sample_in_spite_of_deaths(self, prompt: Ints, sampling: Sampling) -> Completion:
        for _ in range(DEATHS):
            await self._until_serving()
            with suppress(Died):
                return await self._sample(prompt, sampling)
        raise ModelError(f"SGLang died {DEATHS} times over one prompt of {len(prompt)} tokens")

    async def _sample(self, prompt: Ints, sampling: Sampling) -> Completion:
        self._requests += 1
        rid, version = f"{self._run}-{self._requests}", self._version
        fields = wire.request(
            prompt,
            sampling,
            room=self._longest + 1 - len(prompt),
            eos_ids=self._eos_ids,
            rid=rid,
            # Of an older version's prefixes nothing is found under the key of this one.
            key=f"{self._run}-{version}",
        )
        try:
            answer = await self._alive(self._link.call("generate", **fields))
        except asyncio.CancelledError:
            with suppress(ConnectionError):
                await self._link.abort(rid)
            raise
        except ValueError as refused:
            raise ModelError(f"SGLang refuses a prompt of {len(prompt)} tokens: {refused}") from refused
        await self._alive(self._sure.wait())
        done = wire.completion(answer, version)
        self._tokens += len(done.tokens)
        return done

    async def _load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Pause, load, continue. Running completions keep their cache or, retracted, compute it again."""
        call = self._link.call
        flush = self._flush and self._link.version >= wire.FLUSHES_PAUSED
        await call("pause_generation", mode=self._pause)
        sessions = True
        try:
            await call("begin_weight_update")
        except NotImplementedError:
            sessions = False
        await self._carrier.carry(self._link, version, tensors, flush=flush)
        if sessions:
            await call("end_weight_update")
        await call("continue_generation")

    def _count(self, change: int) -> None:
        """Keep the books of busy time: something is in flight."""
        present = time.perf_counter()
        if self._in_flight:
            self._busy_s += present - self._since
        self._since = present
        self._in_flight += change
