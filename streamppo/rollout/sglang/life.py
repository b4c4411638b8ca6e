"""One life of SGLang: from a start, with weights in it, to a death.

begin    start -> make the way for weights -> load -> see that the weights have arrived
swap     pause -> load -> continue -> see that the weights have arrived
"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Literal, NamedTuple

from torch import Tensor

from streamppo.errors import WeightsError
from streamppo.rollout.sglang import attest, wire
from streamppo.rollout.sglang.attest import Attestation
from streamppo.rollout.sglang.link import Link, Start
from streamppo.rollout.sglang.push import Carrier, Connect


class Setup(NamedTuple):
    """The same for all lives: how SGLang starts, how weights get there, what a swap does with running completions."""

    start: Start
    connect: Connect
    kv: Literal["keep", "recompute"]
    vocabulary: int


class Life:
    """A running SGLang that holds weights; `end` is resolved with the reason of its death."""

    def __init__(
        self, link: Link, carrier: Carrier, attestation: Attestation, kv: Literal["keep", "recompute"]
    ) -> None:
        self.link, self.carrier, self.attestation = link, carrier, attestation
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._kv: Literal["keep", "recompute"] = kv

    async def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Load `tensors` as `version`. Raises `ValueError` or `WeightsError` if SGLang does not take them."""
        await _load(self.link, self.carrier, self._kv, version, tensors)
        await self.attestation.check(tensors)


async def begin(setup: Setup, number: int, version: int, tensors: Mapping[str, Tensor]) -> Life:
    """Start SGLang for life `number` on `tensors` as `version`. Raises `ModelError` or `WeightsError` if it cannot."""
    link = await setup.start(number)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(link.stop)
        carrier = await setup.connect(link)
        try:
            await _load(link, carrier, setup.kv, version, tensors)
            attestation = await attest.begin(link, tensors, setup.vocabulary)
        except ValueError as refused:
            raise WeightsError(f"version {version}: {refused}") from refused
        undo.pop_all()
    return Life(link, carrier, attestation, setup.kv)


async def _load(
    link: Link, carrier: Carrier, kv: Literal["keep", "recompute"], version: int, tensors: Mapping[str, Tensor]
) -> None:
    """Pause, load, continue. Running completions keep their cache or, retracted, compute it again."""
    await link.call("pause_generation", mode="in_place" if kv == "keep" else "retract")
    has_sessions = True
    try:
        await link.call("begin_weight_update")
    except NotImplementedError:
        has_sessions = False
    await carrier.carry(version, tensors, flush=kv == "recompute" and link.version >= wire.FLUSHES_PAUSED)
    if has_sessions:
        await link.call("end_weight_update")
    await link.call("continue_generation")
