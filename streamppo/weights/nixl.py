"""Transfers buckets by one-sided NIXL reads (extra `nixl`): an actor reads a rank's memory while the rank computes.

    block        registered memory of a rank, which is reused for one bucket after another
    generation   the number of buckets that a block has held; an actor reads it after the bytes: if it is unchanged,
                 all bytes belong to the same bucket

NIXL uses the fastest device that both nodes have: RDMA, shared memory or TCP. Some devices need regular progress calls
in the rank. A thread of this module makes these calls, because NIXL's progress thread uses most of a core.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from streamppo.errors import WeightsError
from streamppo.types import WireStruct, decode, encode
from streamppo.weights.delta import Bytes
from streamppo.weights.transport import BucketGone, BucketRef

READ_S, SLOWEST_BYTES_PER_S = 60.0, 20e6
"""A read is abandoned after READ_S + bytes / SLOWEST_BYTES_PER_S seconds."""
LOOK_S = 0.0005
BLOCKS = 1 << 16
"""The maximum number of blocks of a rank, and the number of generations that the rank registers."""
KIND = "DRAM"
log = logging.getLogger(__name__)


class RemoteBucket(WireStruct, frozen=True):
    """The reference of a bucket: the metadata of its rank's NIXL agent, and its address in the rank's memory."""

    agent: bytes
    address: int
    nbytes: int
    generation_address: int
    generation: int


class _Block(NamedTuple):
    number: int
    memory: Bytes


class NixlSender:
    """Implements `transport.Sender`. Keeps two whole versions and the deltas after them in memory."""

    def __init__(self, *, local: bool) -> None:
        self._agent, self._lock = _agent(local=local), threading.Lock()
        self._blocks = 0
        self._free: list[_Block] = []
        self._used: dict[int, list[_Block]] = {}
        self._dropped_before = 0
        self._generations = np.zeros(BLOCKS, dtype=np.int64)
        self._register(self._generations)
        threading.Thread(target=self._make_progress, name="nixl", daemon=True).start()

    def put(self, version: int, arrays: Sequence[Bytes]) -> list[BucketRef]:
        blocks = [self._block(array.nbytes) for array in arrays]
        self._used.setdefault(version, []).extend(blocks)
        for block, array in zip(blocks, arrays, strict=True):
            # The generation changes first, so that an actor that reads bytes during the copy finds the new one.
            self._generations[block.number] += 1
            block.memory[: array.nbytes] = array
        with self._lock:
            agent = self._agent.get_agent_metadata()
        return [
            encode(
                RemoteBucket(
                    agent=agent,
                    address=block.memory.ctypes.data,
                    nbytes=array.nbytes,
                    generation_address=self._generations.ctypes.data + 8 * block.number,
                    generation=int(self._generations[block.number]),
                )
            )
            for block, array in zip(blocks, arrays, strict=True)
        ]

    def drop(self, before: int) -> None:
        """See `transport.Sender.drop`. Blocks are freed one call later, so that actors can finish their reads."""
        for version in [version for version in self._used if version < self._dropped_before]:
            self._free += self._used.pop(version)
        self._dropped_before = before

    def _block(self, nbytes: int) -> _Block:
        """Return the free block of `nbytes` to 2 * `nbytes` bytes that was freed first, or a new block."""
        for number, block in enumerate(self._free):
            if nbytes <= block.memory.nbytes <= max(4096, 2 * nbytes):
                return self._free.pop(number)
        block = _Block(self._blocks, np.zeros(max(4096, nbytes), dtype=np.uint8))
        self._blocks += 1
        self._register(block.memory)
        return block

    def _register(self, memory: np.ndarray) -> None:
        with self._lock:
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], KIND)

    def _make_progress(self) -> None:
        while True:
            with self._lock:
                self._agent.get_new_notifs()
            time.sleep(LOOK_S)


class NixlReceiver:
    """Implements `transport.Receiver`. One thread makes all reads, one after another."""

    def __init__(self, *, local: bool) -> None:
        self._agent, self._failures = _agent(local=local), _failures()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nixl")
        self._abandoned: list[object] = []

    async def fetch(self, ref: BucketRef) -> Bytes:
        assert isinstance(ref, bytes), "a reference of NIXL's sender"
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._fetch, decode(ref, RemoteBucket))

    def _fetch(self, remote: RemoteBucket) -> Bytes:
        bucket, generation = np.empty(max(1, remote.nbytes), dtype=np.uint8), np.zeros(8, dtype=np.uint8)
        try:
            name = self._agent.add_remote_agent(remote.agent)
        except self._failures as error:
            raise BucketGone(f"a rank cannot be reached: {error}") from error
        try:
            if remote.nbytes:
                self._read(name, remote.address, bucket)
            self._read(name, remote.generation_address, generation)
        except self._failures as error:
            with suppress(*self._failures):
                self._agent.remove_remote_agent(name)
            raise BucketGone(f"a rank cannot be read: {error}") from error
        if int(generation.view(np.int64)[0]) != remote.generation:
            raise BucketGone("the rank has replaced this bucket by a newer one")
        return bucket[: remote.nbytes]

    def _read(self, name: str, address: int, into: Bytes) -> None:
        agent, place = self._agent, (into.ctypes.data, into.nbytes, 0)
        registered = agent.register_memory([(*place, "")], KIND)
        remote_memory = agent.get_xfer_descs([(address, into.nbytes, 0)], KIND)
        local_memory = agent.get_xfer_descs([place], KIND)
        handle = agent.initialize_xfer("READ", local_memory, remote_memory, name)
        try:
            end = time.monotonic() + READ_S + into.nbytes / SLOWEST_BYTES_PER_S
            state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < end:
                time.sleep(LOOK_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise BucketGone(f"{into.nbytes} bytes of a rank did not arrive in time")
        finally:
            try:
                agent.release_xfer_handle(handle)
                agent.deregister_memory(registered)
            except self._failures:
                # The read may not have ended, so NIXL may still write to this memory.
                self._abandoned.append((into, registered, handle))
                log.info("%d bytes of memory are not freed, because a read into them has not ended", into.nbytes)


def _agent(*, local: bool) -> Any:
    """Make this process's NIXL agent. In a `local` run only this machine can reach it."""
    api = _api()
    if local:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    # NIXL logs two lines for every agent.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return api.nixl_agent(uuid4().hex, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def _api() -> ModuleType:
    try:
        return import_module("nixl._api")
    except ImportError as error:
        raise WeightsError(
            f"learner.transport = {{ kind = 'nixl' }} needs NIXL ({error}): pip install 'streamppo[nixl]', or another "
            "transport"
        ) from error


def _failures() -> tuple[type[Exception], ...]:
    members = vars(import_module("nixl._bindings")).values()
    return tuple(member for member in members if isinstance(member, type) and issubclass(member, Exception))
