"""The embedded engine, for small models on any device. Continuous batching over fixed rows; swaps between tokens.

consumes     requests, in order of arrival; weights
produces     completions, in order of their end; a free row is filled at the next boundary
waits for    requests and weights only
unblocks     the callers of `generate` and `update_weights`

at a boundary:   swap to new weights, if any  ->  admit waiting requests into free rows  ->  step
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from streamppo.rollout import random_numbers
from streamppo.rollout.embedded import decoder as decoders
from streamppo.rollout.embedded.requests import EndTokens, RunningRequest
from streamppo.rollout.embedded.rows import DecodingRows
from streamppo.rollout.engine import Completion, Cuts, Sampling, Usage
from streamppo.rollout.weight_checks import check_prompt
from streamppo.types import Ints

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ADMIT_SHARE = 8
"""Steps stop when 1 / `ADMIT_SHARE` of the rows are free, so that one prefill fills several rows at once."""
MOST_HELD = 8
"""The maximum number of boundaries at which waiting requests are held back because few rows are free."""
BURST_S = 0.01
"""Steps stop after this time, so that ended completions are returned soon."""
R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class EmbeddedEngine:
    """`Engine` with `slots` rows of up to `max_total_tokens` tokens. Construct it in a running event loop."""

    def __init__(
        self,
        hf_config: "PreTrainedConfig",
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        slots: int,
        max_total_tokens: int,
        ends: EndTokens,
        seed: int,
        kv: Literal["keep", "recompute"] = "keep",
        dtype: torch.dtype = torch.float32,
        float32_head: bool = True,
        device: str = "cpu",
    ) -> None:
        self._decoder = decoders.build(
            hf_config,
            tensors,
            longest_row=max_total_tokens,
            rows=slots,
            dtype=dtype,
            float32_head=float32_head,
            device=device,
        )
        self._max_total_tokens = max_total_tokens
        self._rows = DecodingRows(self._decoder, ends, max_total_tokens)
        self._boundaries_held = 0
        self._seed, self._unseeded = seed, itertools.count(1)
        self._checked_prompt: Ints | None = None
        self._version = version
        self._slots = slots
        self._kv = kv
        self._waiting: deque[RunningRequest] = deque()
        self._pending: set[asyncio.Future[Completion] | asyncio.Future[None]] = set()
        self._swap: tuple[int, asyncio.Future[None]] | None = None
        self._swap_lock = asyncio.Lock()
        self._has_work = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        # One thread for all copies: a cancelled swap continues to write, and the next one writes to the same memory.
        self._copies = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")
        self._busy_s = self._idle_s = self._swap_s = 0.0
        self._swaps = 0
        self._loop_task = asyncio.create_task(self._run_loop())
        self._loop_task.add_done_callback(self._fail_all)

    @property
    def version(self) -> int:
        return self._version

    def reserve(self, tokens: int, *, turns: bool = False) -> None:
        """Allocate rows of `tokens` tokens. With `turns`, prompts may continue ended rows. Raises `ModelError`."""
        self._rows.reserve(min(tokens, self._max_total_tokens))
        if turns:
            self._rows.keep_turns()

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        if prompt is not self._checked_prompt:
            # All samples of a prompt pass the same array, which is checked only once.
            check_prompt(prompt, self._max_total_tokens - 1, self._decoder.vocabulary)
            self._checked_prompt = prompt
        limit = min(sampling.max_tokens, self._max_total_tokens - len(prompt))
        if sampling.seed is None:
            sampling = sampling._replace(seed=random_numbers.seed_of_turn(self._seed, next(self._unseeded)))
        request = RunningRequest(prompt, sampling, limit, asyncio.get_running_loop().create_future(), cuts)
        self._wake()
        self._waiting.append(request)
        self._pending.add(request.done)
        try:
            return await request.done
        finally:
            self._pending.discard(request.done)

    async def update_weights(
        self, version: int, tensors: Mapping[str, Tensor], contents: Mapping[str, int] | None = None
    ) -> None:
        """See `Engine.update_weights`. Swaps are serialized; weights are copied while decoding continues."""
        async with self._swap_lock:
            loop = asyncio.get_running_loop()
            self._wake()
            await loop.run_in_executor(self._copies, self._decoder.stage, tensors, contents)
            swapped: asyncio.Future[None] = loop.create_future()
            self._wake()
            self._swap = (version, swapped)
            self._pending.add(swapped)
            try:
                await swapped
            finally:
                self._pending.discard(swapped)
                self._swap = None

    def usage(self) -> Usage:
        rows, swaps = self._rows, (self._swaps, self._swap_s)
        reuse = {"prompted": rows.prompted, "reused": rows.reused, "kv_ages": dict(rows.kv_ages)}
        return Usage(rows.tokens, self._busy_s, self._idle_s, *swaps, **reuse)

    async def stop(self) -> None:
        self._loop_task.cancel()
        await asyncio.wait([self._loop_task])
        self._thread.shutdown()
        self._copies.shutdown(cancel_futures=True)

    def _wake(self) -> None:
        """Wake up `_run_loop`. Raises the error that ended `_run_loop`, or `CancelledError` after `stop`."""
        if self._loop_task.done():
            self._loop_task.result()
        self._has_work.set()

    async def _run_loop(self) -> None:
        while True:
            await self._wait_for_work()
            begin = time.perf_counter()
            self._rows.remove_cancelled()
            if self._swap is not None:
                swap, self._swap = self._swap, None
                await self._apply_swap(*swap)
            # Each call into the thread runs several steps, because a call costs about a tenth of a small model's step.
            ended_requests = await self._run_in_thread(self._step_until_boundary, self._next_requests(), self._version)
            self._rows.hand_over()
            for request in ended_requests:
                request.resolve()
            self._busy_s += time.perf_counter() - begin

    async def _wait_for_work(self) -> None:
        begin = time.perf_counter()
        if not (self._rows.count or self._waiting or self._swap):
            self._has_work.clear()
            await self._has_work.wait()
            self._idle_s += time.perf_counter() - begin

    def _step_until_boundary(self, admitted: list[RunningRequest], version: int) -> list[RunningRequest]:
        """Admit requests, then step until the next boundary. Returns ended requests. Runs in the engine's thread."""
        begin = time.perf_counter()
        ended = self._rows.admit(admitted, version) if admitted else []
        while self._rows.count:
            ended += self._rows.step(version)
            free = self._slots - self._rows.count
            if free * ADMIT_SHARE >= self._slots or self._swap or time.perf_counter() - begin > BURST_S:
                break
        return ended

    def _next_requests(self) -> list[RunningRequest]:
        admitted: list[RunningRequest] = []
        free = self._slots - self._rows.count
        if self._waiting and free * ADMIT_SHARE < self._slots and self._boundaries_held < MOST_HELD:
            self._boundaries_held += 1
            return admitted
        self._boundaries_held = 0
        while self._waiting and len(admitted) < free:
            request = self._waiting.popleft()
            if not request.done.done():
                admitted.append(request)
        return admitted

    async def _apply_swap(self, version: int, swapped: asyncio.Future[None]) -> None:
        begin = time.perf_counter()
        self._rows.cut_before(version)
        self._rows.hand_over()
        self._decoder.adopt()
        self._version = version
        if self._kv == "recompute":
            await self._run_in_thread(self._rows.recompute, version)
        self._swaps += 1
        self._swap_s += time.perf_counter() - begin
        if not swapped.done():
            swapped.set_result(None)

    async def _run_in_thread(self, function: Callable[[*Arguments], R], *arguments: *Arguments) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _fail_all(self, loop_task: asyncio.Task[None]) -> None:
        for future in [future for future in self._pending if not future.done()]:
            if not loop_task.cancelled() and (error := loop_task.exception()):
                future.set_exception(error)
            else:
                future.cancel()
        self._waiting.clear()
