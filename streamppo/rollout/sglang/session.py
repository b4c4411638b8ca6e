"""One session of SGLang: from a start with loaded weights to a death.

begin    start -> connect the weight transport -> stage -> load -> verify every tensor; after a death again
swap     stage -> pause -> load -> continue -> verify every tensor
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Literal, NamedTuple

from torch import Tensor

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.sglang import checks
from streamppo.rollout.sglang.link import HEALTH_S, Link, Start
from streamppo.rollout.sglang.push import Carrier, Connect
from streamppo.rollout.sglang.verify_weights import Attestation

STARTS = 3
"""Maximum number of starts of a session, if SGLang dies before it has loaded the weights."""
log = logging.getLogger(__name__)


class SessionSetup(NamedTuple):
    """Settings of all sessions of an engine. `start` starts SGLang; `connect` connects the transport of weights.

    A row has up to `context` tokens, in this configuration up to `room`. Tokens `eos_ids` end a completion, and tokens
    `unknown` are never sampled. The `encoders` of a multimodal model are not loaded. Versions are copied to buckets of
    `bucket_bytes`, in `shared` memory if SGLang reads them there.
    """

    start: Start
    connect: Connect
    kv: Literal["keep", "recompute"]
    vocabulary: int
    start_s: float
    room: int = 0
    routes: bool = False
    strings: Sequence[str] = ()
    unknown: Sequence[int] = ()
    encoders: Sequence[str] = ()
    bucket_bytes: int = 1 << 28
    shared: bool = False
    eos_ids: Collection[int] = ()
    context: int = 0


class EngineSession:
    """A running SGLang with loaded weights; the future `end` gets the reason for its death."""

    def __init__(
        self, link: Link, carrier: Carrier, attestation: Attestation, kv: Literal["keep", "recompute"]
    ) -> None:
        self.link, self.carrier, self.attestation = link, carrier, attestation
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._kv: Literal["keep", "recompute"] = kv

    async def swap(
        self, version: int, tensors: Mapping[str, Tensor], loaded: Callable[[int], None] = lambda version: None
    ) -> None:
        """Load the staged `tensors` as `version`; call `loaded(version)` before SGLang continues."""
        await _load(self.link, self.carrier, self._kv, version)
        loaded(version)
        await self.link.call("continue_generation")
        await self.attestation.check(tensors)

    async def stop(self) -> None:
        """Release the transport of weights and the connection; processes that this actor has started end."""
        try:
            await self.carrier.close()
        finally:
            await self.link.stop()


async def start(setup: SessionSetup, number: int, version: int, tensors: Mapping[str, Tensor]) -> EngineSession:
    """Start SGLang session `number` with `tensors` as `version`. Raises `ModelError`, or `WeightsError` if refused."""
    for missing in reversed(range(STARTS)):
        try:
            return await _start_once(setup, number, version, tensors)
        except ConnectionError as died:
            if not missing:
                raise ModelError(f"SGLang died in each of {STARTS} starts with version {version}: {died}") from died
            log.info("SGLang died before it had loaded version %d (%s); it gets %d more starts", version, died, missing)
    raise AssertionError("the last start returns or raises")


async def _start_once(setup: SessionSetup, number: int, version: int, tensors: Mapping[str, Tensor]) -> EngineSession:
    link = await setup.start(number)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(link.stop)
        checks.check_room(link.longest, setup.room)
        try:
            async with asyncio.timeout(setup.start_s):
                session = await _until_death(link, _fill(setup, link, version, tensors))
        except TimeoutError:
            limit = f"rollout.engine.start_s ({setup.start_s:g} s)"
            raise ModelError(f"SGLang has started, but has not loaded version {version} within {limit}") from None
        except ValueError as refused:
            raise WeightsError(f"version {version}: {refused}") from refused
        undo.pop_all()
    return session


async def _fill(setup: SessionSetup, link: Link, version: int, tensors: Mapping[str, Tensor]) -> EngineSession:
    carrier = await setup.connect(link)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(carrier.close)
        attestation = Attestation(link, setup.encoders)
        await attestation.begin()
        await carrier.stage(tensors)
        await _load(link, carrier, setup.kv, version)
        await link.call("continue_generation")
        await attestation.check(tensors)
        undo.pop_all()
    return EngineSession(link, carrier, attestation, setup.kv)


async def _until_death(link: Link, work: Coroutine[object, object, EngineSession]) -> EngineSession:
    """Return the result of `work`. Raises `ConnectionError` if SGLang dies, because a call may then never return."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=HEALTH_S)
            if not task.done() and (why := await link.death()):
                raise ConnectionError(why)
        return await task
    finally:
        task.cancel()
        # A cancelled start releases its transport, which needs the link.
        await asyncio.wait([task])


async def _load(link: Link, carrier: Carrier, kv: Literal["keep", "recompute"], version: int) -> None:
    """Pause SGLang and load the weights. `kv` says whether running completions keep their KV cache."""
    await link.call("pause_generation", mode="in_place" if kv == "keep" else "retract")
    await link.call("begin_weight_update")
    await carrier.carry(version, flush=kv == "recompute")
    await link.call("end_weight_update")
