"""SGLang behind the `Engine` protocol: its own processes inside the rollout actor, or a server that runs already.

    consumes     requests, as many at a time as SGLang runs at once; weights
    produces     completions, in order of their end
    waits for    requests and weights; between a death and the next start, for SGLang
    unblocks     the callers of `generate` and `update_weights`

    swap     check names and shapes -> swap (life.py)
    death    begin the next life with the version that was served -> send again every request that was in flight

A swap that fails after the check ends the life of SGLang, so that no doubt is left about its weights: the next life
begins with the version before. No completion is handed over while it is uncertain which weights sampled it.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.engine import Completion, Cuts, Sampling, Usage
from streamppo.rollout.fit import Architecture, check_fit, check_prompt
from streamppo.rollout.sglang import life as lives
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.life import Life, Setup
from streamppo.rollout.sglang.link import HEALTH_S
from streamppo.types import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEATHS = 3
"""A prompt over which SGLang has died this often is not sent again."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class Died(Exception):
    """SGLang died during this call; the message says why."""


async def start(
    setup: Setup,
    hf_config: "PreTrainedConfig",
    *,
    version: int,
    tensors: Mapping[str, Tensor],
    eos_ids: set[int],
    max_total_tokens: int,
) -> "SGLangEngine":
    """Start SGLang on `tensors` as `version`. Completions have at most `max_total_tokens` tokens, prompt included.

    Raises `ModelError` or `WeightsError` if it cannot start.
    """
    architecture = Architecture(hf_config)
    check_fit(architecture.shapes, tensors)
    saved = _own(architecture, tensors)
    life = await lives.begin(setup, 0, version, saved)
    return SGLangEngine(setup, life, architecture, version, saved, eos_ids=eos_ids, max_total_tokens=max_total_tokens)


class SGLangEngine:
    """Implements `Engine`; `start` makes it. `life` holds `tensors`, named as in the model's files, as `version`."""

    def __init__(
        self,
        setup: Setup,
        life: Life,
        architecture: Architecture,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        eos_ids: set[int],
        max_total_tokens: int,
    ) -> None:
        self._setup, self._life, self._architecture = setup, life, architecture
        self._version, self._tensors = version, tensors
        self._eos_ids, self._longest = sorted(eos_ids), max_total_tokens - 1
        self._capacity = asyncio.Semaphore(life.link.capacity)
        self._run = uuid.uuid4().hex[:8]
        self._swapping = asyncio.Lock()
        self._serving, self._certain = asyncio.Event(), asyncio.Event()
        self._serving.set()
        self._certain.set()
        self._cancel_calls: set[Callable[[], bool]] = set()
        self._tokens = self._swaps = self._in_flight = self._requests = self._restarts = 0
        self._busy_s = self._swap_s = 0.0
        self._begin = self._since = time.perf_counter()
        self._watch = asyncio.create_task(self._keep_alive())

    @property
    def version(self) -> int:
        """The version of the weights that the next token will be sampled with."""
        return self._version

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        """See `Engine.generate`. A completion that SGLang had begun when it died is sampled from its beginning."""
        check_prompt(prompt, self._longest, self._setup.vocabulary)
        async with self._capacity:
            self._count(+1)
            try:
                return await self._sample_in_spite_of_deaths(prompt, sampling)
            finally:
                self._count(-1)

    async def update_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `Engine.update_weights`."""
        check_fit(self._architecture.shapes, tensors)
        saved = await asyncio.to_thread(_own, self._architecture, tensors)
        async with self._swapping:
            await self._until_serving()
            begin = time.perf_counter()
            self._certain.clear()
            try:
                await self._until_death(self._life.swap(version, saved))
            except Died as died:
                raise WeightsError(f"SGLang died while it took version {version} ({died})") from None
            except (ValueError, WeightsError) as refused:
                self._end_life(f"it refused version {version}")
                raise WeightsError(f"version {version}: {refused}") from refused
            self._version, self._tensors = version, saved
            self._certain.set()
            self._swaps += 1
            self._swap_s += time.perf_counter() - begin

    def usage(self) -> Usage:
        """See `Engine.usage`."""
        self._count(0)
        idle_s = time.perf_counter() - self._begin - self._busy_s
        return Usage(self._tokens, self._busy_s, idle_s, self._swaps, self._swap_s, self._restarts)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._watch.cancel()
        await asyncio.wait([self._watch])
        for cancel in list(self._cancel_calls):
            cancel()
        await self._life.link.stop()

    # --- life and death --------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        """Look at SGLang's health without end; begin the next life after a death. Raises if that fails."""
        while True:
            life = self._life
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_S):
                    await asyncio.shield(life.end)
            if not life.end.done() and (why := await life.link.death()):
                self._end_life(why)
            if life.end.done():
                log.info("SGLang ended: %s; starting it again with version %d", life.end.result(), self._version)
                await life.link.stop()
                self._restarts += 1
                self._life = await lives.begin(self._setup, self._restarts, self._version, self._tensors)
                self._serving.set()
                self._certain.set()

    def _end_life(self, why: str) -> None:
        self._serving.clear()
        self._certain.clear()
        if not self._life.end.done():
            self._life.end.set_result(why)

    async def _until_death(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, which dies with SGLang. Raises `Died`."""
        end = self._life.end
        call = asyncio.ensure_future(work)
        self._cancel_calls.add(call.cancel)
        try:
            await asyncio.wait([call, end], return_when=asyncio.FIRST_COMPLETED)
            if not end.done():
                return await call
        except ConnectionError as error:
            self._end_life(str(error))
        finally:
            call.cancel()
            self._cancel_calls.discard(call.cancel)
        raise Died(end.result())

    async def _until_serving(self) -> None:
        """Wait until SGLang runs and is certain to hold `version`. Raises the error of a start that failed."""
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

    # --- requests --------------------------------------------------------------------------------------------

    async def _sample_in_spite_of_deaths(self, prompt: Ints, sampling: Sampling) -> Completion:
        for _ in range(DEATHS):
            await self._until_serving()
            with suppress(Died):
                return await self._sample(prompt, sampling)
        raise ModelError(f"SGLang died {DEATHS} times over one prompt of {len(prompt)} tokens")

    async def _sample(self, prompt: Ints, sampling: Sampling) -> Completion:
        self._requests += 1
        link, rid, version = self._life.link, f"{self._run}-{self._requests}", self._version
        fields = wire.request(
            prompt,
            sampling,
            room=self._longest + 1 - len(prompt),
            eos_ids=self._eos_ids,
            rid=rid,
            # Prefixes of an older version are not found under the key of this one.
            key=f"{self._run}-{version}",
        )
        try:
            answer = await self._until_death(link.call("generate", **fields))
        except asyncio.CancelledError:
            with suppress(ConnectionError):
                await link.abort(rid)
            raise
        except ValueError as refused:
            raise ModelError(f"SGLang refuses a prompt of {len(prompt)} tokens: {refused}") from refused
        await self._until_death(self._certain.wait())
        completion = wire.completion(answer, version, cuts=sampling.cuts, kv=self._setup.kv)
        self._tokens += len(completion.tokens)
        return completion

    def _count(self, change: int) -> None:
        """Count requests in flight by `change`, and the time during which there are any."""
        present = time.perf_counter()
        if self._in_flight:
            self._busy_s += present - self._since
        self._since = present
        self._in_flight += change


def _own(architecture: Architecture, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name and cut `tensors` as the model's files do, in memory of this process, which keeps them for the next life.

    As they came they are views of the object store, which holds a fixed number of versions.
    """
    return architecture.as_saved({name: tensor.clone() for name, tensor in tensors.items()})
